"""What the supervisor is told to do: stop, change a pool's size, roll, replace workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_processes import HEARTBEAT_S, LEASE_S, SPECS, FakeLauncher, epochs, eventually, supervised

from antiphon.cluster import member as member_module
from antiphon.cluster.member import MemberState
from antiphon.cluster.process import StartFailed
from antiphon.cluster.supervisor import OperationFailed, Supervisor
from antiphon.protocol.identity import Role

pytestmark = pytest.mark.usefixtures("quick_backoff")


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
        waiting = launcher.life("decode-0")
        before = waiting.times_asked

        async def drain(timeout_s: float) -> bool:
            await eventually(lambda: waiting.times_asked >= before + 5, "questions while another one drains")
            return True

        launcher.life("router-0").drain = drain  # type: ignore[method-assign]
        assert await supervisor.stop(60.0)


async def test_stop_says_when_it_cut_something_off() -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(SPECS, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    await supervisor.start()
    launcher.life("router-0").drain_s = 60.0
    assert not await supervisor.stop(0.05)
    assert all(life.death.done() for lives in launcher.lives.values() for life in lives)


@pytest.mark.parametrize("draining", [False, True], ids=["at once", "while it drains"])
async def test_a_cancelled_stop_still_kills_everything(draining: bool) -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(SPECS, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    await supervisor.start()
    router = launcher.life("router-0")
    router.drain_s = 3600.0
    stopping = asyncio.create_task(supervisor.stop(3600.0))
    await asyncio.sleep(0)
    if draining:
        await eventually(lambda: ("drain", "router-0", router.epoch) in launcher.journal, "the drain")
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
    """At once, however long it would have waited."""
    launcher = FakeLauncher()
    async with supervised(launcher) as supervisor:
        await supervisor.scale(Role.DECODE, 2, 1.0)
        monkeypatch.setattr(member_module, "restart_delay_s", lambda failures: 3600.0)
        launcher.life("decode-1").death.set_result("gone")
        (youngest,) = (m for m in supervisor.members if m.spec.worker_id == "decode-1")
        await eventually(lambda: youngest.state is MemberState.LOST, "the loss is noticed")
        async with asyncio.timeout(60):
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
        replaced = await supervisor.replace_workers(new, drain_timeout_s=1.0, ready_timeout_s=60.0)
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
        assert await supervisor.replace_workers(new, drain_timeout_s=0.1, ready_timeout_s=60.0) == 2


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
        begun, over = asyncio.Event(), asyncio.Event()

        async def drain(timeout_s: float) -> bool:
            begun.set()
            await over.wait()
            return True

        first.drain = drain  # type: ignore[method-assign]
        rolling = asyncio.create_task(supervisor.roll(3600.0))
        async with asyncio.timeout(60):
            await begun.wait()
            first.death.set_result("exit code 9")
            await eventually(lambda: launcher.life("prefill-0") is not first, "the next life")
            second = launcher.life("prefill-0")
            over.set()
            await rolling
        assert launcher.life("prefill-0") is second, "the end of the first life was taken out on the second"
        assert ("stop", "prefill-0", second.epoch) not in launcher.journal
        assert "prefill-0" in running(supervisor)
