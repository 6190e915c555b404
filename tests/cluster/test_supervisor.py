"""The supervisor's decisions, on processes that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from antiphon.cluster import member as member_module
from antiphon.cluster.member import LONGEST_BACKOFF_S, MemberState, restart_delay_s
from antiphon.cluster.process import ProcessDied, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.supervisor import OperationFailed, Supervisor
from antiphon.protocol.identity import Role, Topology, WorkerAddress

LEASE_S = 0.3
HEARTBEAT_S = 0.02

SPECS = (
    ProcessSpec("prefill-0", Role.PREFILL, 1, 0, 1),
    ProcessSpec("decode-0", Role.DECODE, 1, 0, 1),
    ProcessSpec("router-0", Role.ROUTER, 1, 0, 1),
)


class FakeProcess:
    """One life that a test can end, silence or fail."""

    def __init__(self, spec: ProcessSpec, epoch: int, journal: list[tuple[str, str, int]]) -> None:
        self.spec = spec
        self.epoch = epoch
        self.journal = journal
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.start_error: Exception | None = None
        self.silent = False
        self.failed: str | None = None
        self.overdue: tuple[tuple[str, int], ...] = ()
        self.topologies: list[Topology] = []
        self.lose_topologies = 0
        self.drain_s = 0.0
        self.times_asked = 0

    def note(self, what: str) -> None:
        self.journal.append((what, self.spec.worker_id, self.epoch))

    def check_alive(self) -> None:
        if self.death.done():
            raise ProcessDied(self.death.result())

    async def start(self, topology: Topology) -> WorkerAddress:
        await asyncio.sleep(0)
        if self.start_error is not None:
            raise self.start_error
        self.check_alive()
        self.note("start")
        return WorkerAddress(self.spec.worker_id, self.spec.role, self.epoch, f"tcp://here:{self.epoch}")

    async def set_topology(self, topology: Topology) -> None:
        self.check_alive()
        if self.lose_topologies:
            self.lose_topologies -= 1
            raise TimeoutError
        self.topologies.append(topology)
        self.journal.append((f"told {topology.version}", self.spec.worker_id, self.epoch))

    async def status(self) -> ProcessStatus:
        self.check_alive()
        self.times_asked += 1
        if self.silent:
            await asyncio.Event().wait()
        return ProcessStatus(
            self.spec.worker_id, True, "", self.failed, 0, 0, self.overdue, pairs=self.pairs()
        )

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """A router sends requests to every worker that it was told of."""
        known = self.topologies[-1] if self.topologies else Topology(0, ())
        return tuple(
            (p.worker_id, d.worker_id)
            for p in known.of_role(Role.PREFILL)
            for d in known.of_role(Role.DECODE)
        )

    async def drain(self, timeout_s: float) -> bool:
        self.check_alive()
        self.note("drain")
        await asyncio.sleep(min(self.drain_s, timeout_s))
        return self.drain_s <= timeout_s

    async def stop(self) -> None:
        self.note("stop")

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)

    def kill(self) -> None:
        if not self.death.done():
            self.note("kill")
            self.death.set_result("killed")


class FakeLauncher:
    """Keeps every life it made, newest last, by worker."""

    def __init__(self) -> None:
        self.lives: dict[str, list[FakeProcess]] = {}
        self.journal: list[tuple[str, str, int]] = []
        self.prepare: Callable[[FakeProcess], None] = lambda process: None
        self.room = 8
        self._epochs = 0

    def launch(self, spec: ProcessSpec) -> FakeProcess:
        self._epochs += 1
        process = FakeProcess(spec, self._epochs, self.journal)
        self.prepare(process)
        self.lives.setdefault(spec.worker_id, []).append(process)
        return process

    async def make_room(self, spec: ProcessSpec) -> None:
        if self.room == 0:
            raise StartFailed("the cluster has no room")
        self.room -= 1

    def free_room(self, spec: ProcessSpec) -> None:
        self.room += 1

    def life(self, worker_id: str) -> FakeProcess:
        return self.lives[worker_id][-1]


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "FIRST_BACKOFF_S", 0.01)


@asynccontextmanager
async def supervised(
    launcher: FakeLauncher, specs: tuple[ProcessSpec, ...] = SPECS
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(specs, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop(0.0)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def epochs(topology: Topology) -> dict[str, int]:
    return {worker.worker_id: worker.epoch for worker in topology.workers}


async def test_every_worker_is_told_of_every_other() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        await eventually(
            lambda: all(
                lives[-1].topologies and len(lives[-1].topologies[-1].workers) == 3
                for lives in launcher.lives.values()
            ),
            "the full topology at every process, the router included",
        )
        assert {w.role for w in supervisor.topology.workers} == set(Role)
        assert all(member.state is MemberState.RUNNING for member in supervisor.members)


async def test_a_dead_worker_comes_back_with_a_new_epoch_and_peers_hear_of_both() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        before = launcher.life("prefill-0").epoch
        launcher.life("prefill-0").death.set_result("exit code 9")
        await eventually(lambda: epochs(supervisor.topology).get("prefill-0", before) != before, "a new life")
        decode = launcher.life("decode-0")
        await eventually(lambda: decode.topologies[-1] == supervisor.topology, "decode hears of the new life")
        seen = [epochs(t).get("prefill-0") for t in decode.topologies]
        assert None in seen
        assert seen[-1] == launcher.life("prefill-0").epoch
        versions = [t.version for t in decode.topologies]
        assert versions == sorted(set(versions))
        assert next(m for m in supervisor.members if m.spec.worker_id == "prefill-0").restarts == 1


async def test_a_silent_worker_is_killed_before_its_peers_hear_of_its_death() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        prefill = launcher.life("prefill-0")
        await eventually(lambda: "prefill-0" in epochs(launcher.life("decode-0").topologies[-1]), "the pair")
        prefill.silent = True
        await eventually(prefill.death.done, "the kill")
        await eventually(lambda: launcher.life("prefill-0") is not prefill, "a new life")
        journal = launcher.journal
        killed = journal.index(("kill", "prefill-0", prefill.epoch))
        gone = next(t.version for t in launcher.life("decode-0").topologies if not epochs(t).get("prefill-0"))
        # the first topology of all may lack it too, from before it had started
        told = [
            i for i, (what, who, _) in enumerate(journal) if who == "decode-0" and what.startswith("told")
        ]
        assert gone <= supervisor.topology.version
        assert [i for i in told if i > killed]


async def test_a_worker_that_says_it_failed_is_replaced() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher):
        first = launcher.life("decode-0")
        first.failed = "the engine raised"
        await eventually(lambda: launcher.life("decode-0") is not first, "a new life")
        assert ("kill", "decode-0", first.epoch) in launcher.journal


async def test_a_writer_past_its_lease_is_killed_and_only_that_life_of_it() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher):
        writer, decode = launcher.life("prefill-0"), launcher.life("decode-0")
        decode.overdue = (("prefill-0", writer.epoch + 1000),)
        await asyncio.sleep(5 * HEARTBEAT_S)
        assert not writer.death.done()
        decode.overdue = (("prefill-0", writer.epoch),)
        await eventually(writer.death.done, "the kill")
        await eventually(lambda: launcher.life("prefill-0") is not writer, "a new life")
        await asyncio.sleep(5 * HEARTBEAT_S)
        assert not launcher.life("prefill-0").death.done()


async def test_a_topology_that_did_not_arrive_is_sent_again() -> None:
    launcher = FakeLauncher()
    launcher.prepare = lambda process: setattr(process, "lose_topologies", 2)
    async with supervised(launcher) as supervisor:
        await eventually(
            lambda: all(
                lives[-1].topologies and lives[-1].topologies[-1] == supervisor.topology
                for lives in launcher.lives.values()
            ),
            "the topology everywhere",
        )


async def test_a_first_life_that_cannot_start_ends_the_start_with_its_reason() -> None:
    launcher = FakeLauncher()

    def prepare(process: FakeProcess) -> None:
        if process.spec.role is Role.DECODE:
            process.start_error = StartFailed("model.safetensors: truncated")

    launcher.prepare = prepare
    with pytest.raises(StartFailed, match=r"decode-0: model\.safetensors: truncated"):
        async with supervised(launcher):
            raise AssertionError("it started")
    assert all(life.death.done() for lives in launcher.lives.values() for life in lives)


async def test_a_later_life_that_cannot_start_is_tried_again() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        first = launcher.life("decode-0")
        refusals = iter([StartFailed("port in use"), ProcessDied("killed for memory")])
        launcher.prepare = lambda process: setattr(process, "start_error", next(refusals, None))
        first.death.set_result("gone")
        await eventually(lambda: "decode-0" in epochs(supervisor.topology), "it was seen")
        await eventually(
            lambda: epochs(supervisor.topology).get("decode-0", first.epoch) != first.epoch,
            "a life that runs",
        )
        assert len(launcher.lives["decode-0"]) == 4


async def test_death_while_starting_is_noticed() -> None:
    launcher = FakeLauncher()
    deaths = iter(["killed"])

    def prepare(process: FakeProcess) -> None:
        if process.spec.role is Role.PREFILL and (reason := next(deaths, None)) is not None:
            process.death.set_result(reason)

    launcher.prepare = prepare
    async with supervised(launcher) as supervisor:
        assert len(launcher.lives["prefill-0"]) == 2
        assert "prefill-0" in epochs(supervisor.topology)


async def test_stop_drains_routers_first_and_leaves_no_process() -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(SPECS, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    await supervisor.start()
    assert await supervisor.stop(1.0)
    ended = [who for what, who, _ in launcher.journal if what == "drain"]
    assert ended[0] == "router-0"
    assert set(ended) == {"router-0", "decode-0", "prefill-0"}
    assert all(life.death.done() for lives in launcher.lives.values() for life in lives)


async def test_those_who_wait_while_others_drain_are_still_asked() -> None:
    """A process that nobody asks ends itself."""
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        launcher.life("router-0").drain_s = 20 * HEARTBEAT_S
        waiting = launcher.life("decode-0")
        before = waiting.times_asked
        assert await supervisor.stop(60.0)
        assert waiting.times_asked >= before + 5


async def test_stop_says_when_it_cut_something_off() -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(SPECS, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    await supervisor.start()
    launcher.life("router-0").drain_s = 60.0
    assert not await supervisor.stop(0.05)
    assert all(life.death.done() for lives in launcher.lives.values() for life in lives)


async def test_a_cancelled_stop_still_kills_everything() -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(SPECS, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    await supervisor.start()
    launcher.life("router-0").drain_s = 60.0
    stopping = asyncio.create_task(supervisor.stop(60.0))
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert all(life.death.done() for lives in launcher.lives.values() for life in lives)


def running(supervisor: Supervisor) -> set[str]:
    return {m.spec.worker_id for m in supervisor.members if m.state is MemberState.RUNNING}


async def test_a_pool_grows_and_shrinks_at_run_time() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        await supervisor.scale(Role.PREFILL, 3, 1.0)
        assert running(supervisor) == {"prefill-0", "prefill-1", "prefill-2", "decode-0", "router-0"}
        assert {"prefill-1", "prefill-2"} <= {p for p, _ in launcher.life("router-0").pairs()}
        await supervisor.scale(Role.PREFILL, 1, 1.0)
        assert running(supervisor) == {"prefill-0", "decode-0", "router-0"}
        assert set(epochs(supervisor.topology)) == {"prefill-0", "decode-0", "router-0"}
        assert launcher.room == 8
        for name in ("prefill-1", "prefill-2"):
            ended = launcher.life(name)
            assert ended.death.done()
            whole = [what for what, who, _ in launcher.journal if who == name and not what.startswith("told")]
            assert whole == ["start", "drain", "stop", "kill"]
        assert not launcher.life("prefill-0").death.done()


async def test_a_member_that_waits_for_its_next_life_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        await supervisor.scale(Role.DECODE, 2, 1.0)
        monkeypatch.setattr(member_module, "FIRST_BACKOFF_S", 0.2)
        launcher.life("decode-1").death.set_result("gone")
        (youngest,) = (m for m in supervisor.members if m.spec.worker_id == "decode-1")
        await eventually(lambda: youngest.state is MemberState.LOST, "the loss is noticed")
        async with asyncio.timeout(5):
            await supervisor.scale(Role.DECODE, 1, 1.0)
        assert len(launcher.lives["decode-1"]) == 1, "no life follows"
        assert youngest not in supervisor.members


async def test_a_pool_that_cannot_grow_says_why_and_the_deployment_goes_on() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        launcher.room = 0
        with pytest.raises(OperationFailed, match="decode-1: the cluster has no room"):
            await supervisor.scale(Role.DECODE, 2, 1.0)
        launcher.room = 1
        launcher.prepare = lambda process: setattr(process, "start_error", StartFailed("no such file"))
        with pytest.raises(OperationFailed, match="decode-1: no such file"):
            await supervisor.scale(Role.DECODE, 2, 1.0)
        assert launcher.room == 1
        with pytest.raises(OperationFailed, match="decode=0"):
            await supervisor.scale(Role.DECODE, 0, 1.0)
        assert running(supervisor) == {"prefill-0", "decode-0", "router-0"}


async def test_workers_of_a_revision_take_the_place_of_those_before() -> None:
    launcher = FakeLauncher()
    new = tuple(replace(spec, revision="b") for spec in (SPECS[0], SPECS[0], SPECS[1]))
    async with supervised(launcher) as supervisor:
        replaced = await supervisor.replace_workers(new, drain_timeout_s=1.0, ready_timeout_s=5.0)
        assert replaced == 2
        assert running(supervisor) == {"prefill-1", "prefill-2", "decode-1", "router-0"}
        revisions = {m.spec.worker_id: m.spec.revision for m in supervisor.members}
        assert revisions == {"prefill-1": "b", "prefill-2": "b", "decode-1": "b", "router-0": ""}
        events = [(what, who) for what, who, _ in launcher.journal if not what.startswith("told")]
        started = max(events.index(("start", who)) for who in ("prefill-1", "prefill-2", "decode-1"))
        # The new ones serve first; then decode, which may still need prefill, goes before it.
        assert started < events.index(("drain", "decode-0")) < events.index(("stop", "decode-0"))
        assert events.index(("stop", "decode-0")) < events.index(("drain", "prefill-0"))
        assert not launcher.life("router-0").death.done()


@pytest.mark.parametrize("trouble", ["no room for the second", "cannot start", "never serves"])
async def test_workers_that_cannot_take_the_place_go_again_and_the_old_ones_serve_on(trouble: str) -> None:
    launcher = FakeLauncher()
    new = tuple(replace(spec, revision="b") for spec in SPECS[:2])
    async with supervised(launcher) as supervisor:
        room = launcher.room
        if trouble == "no room for the second":
            room = launcher.room = 1
        elif trouble == "cannot start":
            launcher.prepare = lambda process: setattr(process, "start_error", StartFailed("no such file"))
        else:
            launcher.prepare = lambda process: setattr(process, "silent", True)
        with pytest.raises(OperationFailed, match="nothing was replaced: "):
            await supervisor.replace_workers(new, drain_timeout_s=0.1, ready_timeout_s=0.1)
        assert running(supervisor) == {"prefill-0", "decode-0", "router-0"}
        assert launcher.room == room
        assert all(not launcher.life(spec.worker_id).death.done() for spec in SPECS)
        launcher.prepare, launcher.room = (lambda process: None), 8
        assert await supervisor.replace_workers(new, drain_timeout_s=0.1, ready_timeout_s=5.0) == 2


async def test_a_roll_restarts_everything_and_never_leaves_a_role_of_workers_empty() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        before = epochs(supervisor.topology)
        fewest = dict.fromkeys((Role.PREFILL, Role.DECODE), 10)

        async def watch() -> None:
            while True:
                for role in fewest:
                    up = [
                        m
                        for m in supervisor.members
                        if m.spec.role is role and m.state is MemberState.RUNNING
                    ]
                    fewest[role] = min(fewest[role], len(up))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        assert await supervisor.roll(1.0) == 3
        watching.cancel()
        assert fewest == {Role.PREFILL: 1, Role.DECODE: 1}
        after = epochs(supervisor.topology)
        assert set(after) == set(before)
        assert all(after[name] != before[name] for name in before)
        assert all(member.failures == 0 for member in supervisor.members)


async def test_a_roll_without_room_for_a_second_worker_says_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        launcher.room = 0
        with pytest.raises(OperationFailed, match=r"prefill-1: .* no room; restarted before that: nothing"):
            await supervisor.roll(1.0)
        launcher.room = 1
        monkeypatch.setattr(launcher, "free_room", lambda spec: None)  # somebody else took it at once
        with pytest.raises(OperationFailed, match=r"decode-1: .* no room; restarted before that: prefill-0"):
            await supervisor.roll(1.0)
        assert running(supervisor) == {"prefill-0", "decode-0", "router-0"}
        assert len(launcher.lives["decode-0"]) == 1


async def test_a_drain_that_takes_too_long_is_cut_short_and_the_roll_goes_on() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        first = launcher.life("decode-0")
        first.drain_s = 60.0
        assert await supervisor.roll(0.02) == 3
        assert first.death.done()


async def test_a_member_that_dies_while_it_drains_comes_back() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        first = launcher.life("prefill-0")
        first.drain_s = 0.3
        rolling = asyncio.create_task(supervisor.roll(5.0))
        await eventually(lambda: any(what == "drain" for what, _, _ in launcher.journal), "the drain")
        first.death.set_result("exit code 9")
        await eventually(lambda: launcher.life("prefill-0") is not first, "the next life")
        second = launcher.life("prefill-0")
        await asyncio.wait_for(rolling, 10)
        assert launcher.life("prefill-0") is second, "the end of the first life was taken out on the second"
        assert ("stop", "prefill-0", second.epoch) not in launcher.journal
        assert "prefill-0" in running(supervisor)


def test_backoff_doubles_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "FIRST_BACKOFF_S", 0.5)
    delays = [restart_delay_s(failures) for failures in range(1, 10)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_BACKOFF_S
    assert restart_delay_s(10**6) == LONGEST_BACKOFF_S
