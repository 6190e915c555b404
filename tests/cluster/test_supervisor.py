"""What the supervisor does about lives that begin, end, fail or fall silent."""

from __future__ import annotations

import pytest
from fake_processes import FakeLauncher, FakeProcess, epochs, eventually, supervised

from antiphon.cluster import member as member_module
from antiphon.cluster.member import LONGEST_BACKOFF_S, MemberState, restart_delay_s
from antiphon.cluster.process import ProcessDied, StartFailed
from antiphon.protocol.identity import Role

pytestmark = pytest.mark.usefixtures("quick_backoff")


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
        await eventually(
            lambda: decode.topologies[-1:] == [supervisor.topology], "decode hears of the new life"
        )
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
        decode = launcher.life("decode-0")
        await eventually(lambda: decode.topologies[-1:] == [supervisor.topology], "the pair")
        prefill.silent = True
        await eventually(prefill.death.done, "the kill")
        await eventually(lambda: launcher.life("prefill-0") is not prefill, "a new life")
        journal = launcher.journal
        killed = journal.index(("kill", "prefill-0", prefill.epoch))
        gone = next(t.version for t in decode.topologies if not epochs(t).get("prefill-0"))
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


async def answered_again(process: FakeProcess) -> None:
    """Wait until what a process says now was heard, more than once."""
    before = process.times_asked
    await eventually(lambda: process.times_asked >= before + 5, "more answers")


async def test_a_writer_past_its_lease_is_killed_and_only_that_life_of_it() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher):
        writer, decode = launcher.life("prefill-0"), launcher.life("decode-0")
        decode.overdue = (("prefill-0", writer.epoch + 1000),)
        await answered_again(decode)
        assert not writer.death.done()
        decode.overdue = (("prefill-0", writer.epoch),)
        await eventually(writer.death.done, "the kill")
        await eventually(lambda: launcher.life("prefill-0") is not writer, "a new life")
        await answered_again(decode)
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


def test_backoff_doubles_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "FIRST_BACKOFF_S", 0.5)
    delays = [restart_delay_s(failures) for failures in range(1, 10)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_BACKOFF_S
    assert restart_delay_s(10**6) == LONGEST_BACKOFF_S
