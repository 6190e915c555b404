"""When a process counts as gone, and what ends one that nobody can reach."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from antiphon.cluster import lifeline as lifeline_module
from antiphon.cluster.lifeline import ALARM_SHARE, Lifeline, gone_after_s, lifeline_s
from antiphon.cluster.process_identity import ProcessIdentity, _started_ticks
from antiphon.cluster.ray_process import RayProcess
from antiphon.protocol.identity import Role, Topology, WorkerAddress

ADDRESS = WorkerAddress("prefill-0", Role.PREFILL, 1, "tcp://127.0.0.1:1")
KILLED, SEEN = "The actor was killed by `ray.kill`.", "dead because its worker process has died"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def identity_of(pid: int) -> ProcessIdentity:
    started = _started_ticks(pid)
    assert started is not None
    return replace(ProcessIdentity.of_this_process(), pid=pid, started_ticks=started)


class RayError(Exception):
    pass


class UnreachableActor:
    """Ray says that it is dead as soon as it was asked to kill it, which touches no process."""

    def __init__(self, identity: ProcessIdentity, reason: str) -> None:
        self._answers = {"identity": identity, "start": ADDRESS, "status": None, "stop": None}
        self._reason = reason
        self.said_to_be_dead = asyncio.Event()

    def __getattr__(self, method: str) -> Any:
        actor = self

        class Call:
            @staticmethod
            async def remote(*_: Any) -> Any:
                if method == "wait_for_ever":
                    await actor.said_to_be_dead.wait()
                    raise RayError(actor._reason)
                return actor._answers[method]

        return Call


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    module, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    module.kill = lambda actor, no_restart: actor.said_to_be_dead.set()  # type: ignore[attr-defined]
    errors.RayActorError, errors.RayTaskError = RayError, ZeroDivisionError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)


@pytest.mark.parametrize("answers", [True, False])
async def test_every_rank_is_told_that_somebody_asks(answers: bool) -> None:
    """Otherwise those after the first would end, or would never."""
    asked: list[int] = []
    gate = asyncio.Event()

    class Rank(UnreachableActor):
        def __getattr__(self, method: str) -> Any:
            if method != "asked":
                return super().__getattr__(method)
            rank = self

            class Call:
                @staticmethod
                async def remote() -> None:
                    asked.append(id(rank))
                    if not answers:
                        await gate.wait()

            return Call

    here = ProcessIdentity.of_this_process()
    ranks = [Rank(here, KILLED) for _ in range(3)]
    process = RayProcess(ranks[0], ranks[1:], lambda _: None)
    for _ in range(3):
        await process.status()
        await asyncio.sleep(0)
    assert [asked.count(id(rank)) for rank in ranks] == ([0, 3, 3] if answers else [0, 1, 1])
    gate.set()


async def started(identity: ProcessIdentity, reason: str = KILLED, gone_s: float = 0.4) -> RayProcess:
    process = RayProcess(UnreachableActor(identity, reason), [], lambda _: None, gone_after_s=gone_s)
    await process.start(Topology(0, ()))
    return process


@pytest.mark.parametrize("stopped", [False, True])
async def test_one_of_this_machine_is_ended_though_ray_does_not_reach_it(
    child: subprocess.Popen[bytes], stopped: bool
) -> None:
    identity = identity_of(child.pid)
    process = await started(identity)
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
    process.kill()
    async with asyncio.timeout(60):
        await process.wait_dead()
    assert not identity.lives
    assert child.wait(60) == -signal.SIGKILL


async def test_one_elsewhere_counts_as_gone_only_when_its_lifeline_has_run_out() -> None:
    elsewhere = replace(ProcessIdentity.of_this_process(), machine="another")
    process = await started(elsewhere)
    before = time.monotonic()
    await process.status()
    process.kill()
    await process.wait_dead()
    assert time.monotonic() - before >= 0.4
    assert ProcessIdentity.of_this_process().lives, "the number means another process there"


@pytest.mark.parametrize(("reason", "stops"), [(SEEN, False), (KILLED, True)])
async def test_one_elsewhere_is_not_waited_for_when_its_end_is_known(reason: str, stops: bool) -> None:
    elsewhere = replace(ProcessIdentity.of_this_process(), machine="another")
    process = await started(elsewhere, reason, gone_s=3600.0)
    if stops:
        await process.stop()
    process.kill()
    async with asyncio.timeout(60):
        await process.wait_dead()


def test_one_elsewhere_that_heard_its_last_question_late_has_ended_when_it_counts_as_gone() -> None:
    """Late by most of half a lease, though its alarm clock must end it: it runs for the longest time."""
    for lease_s in (0.5, 5.0, 60.0):
        assert 0.4 * lease_s + ALARM_SHARE * lifeline_s(lease_s) < gone_after_s(lease_s)


def test_a_number_that_another_process_has_by_now_is_not_the_same_process(
    child: subprocess.Popen[bytes],
) -> None:
    identity = identity_of(child.pid)
    earlier = replace(identity, started_ticks=identity.started_ticks - 1)
    assert identity.lives
    assert not earlier.lives
    earlier.kill()
    assert child.poll() is None
    identity.kill()
    child.wait(60)
    assert not identity.lives
    identity.kill()


def test_a_dead_process_that_nobody_waited_for_does_not_live(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while identity.lives:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Clock:
    """Time of a thread that sleeps in it; it goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._changed = threading.Condition()
        self._wakes_at: float | None = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self._wakes_at = wakes_at = self.now + seconds
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.now >= wakes_at, 60)

    def go_on(self, seconds: float, over: Callable[[], object] = lambda: False) -> None:
        """Let so much time pass, and wait until the thread sleeps again, or it is ``over``."""
        deadline = time.monotonic() + 60
        with self._changed:
            self.now += seconds
            self._changed.notify_all()
            while not over() and (self._wakes_at is None or self._wakes_at <= self.now):
                assert time.monotonic() < deadline, f"at {self.now} it sleeps until {self._wakes_at}"
                self._changed.wait(0.01)


def test_a_process_ends_when_nobody_asks_for_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(lifeline_module, "time", clock)
    ends: list[float] = []
    threads = set(threading.enumerate())
    lifeline = Lifeline(3.0, lambda: ends.append(clock.now))
    assert set(threading.enumerate()) <= threads, "nobody has begun to ask, and nothing waits for that"
    clock.now += 100
    for _ in range(8):
        lifeline.asked()
        clock.go_on(2.0)
        assert not ends
    clock.go_on(0.5)
    assert not ends
    clock.go_on(0.5, over=lambda: ends)
    assert ends == [117.0]


HOLDS_THE_INTERPRETER = """
from antiphon.cluster import lifeline
lifeline._exit = lambda: None  # should its thread get a turn all the same, before the interpreter is held
lifeline.Lifeline(0.3).asked()
sum(range(10**14))
"""


def test_one_that_lets_no_thread_run_is_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_INTERPRETER]) as stuck:
        try:
            assert stuck.wait(60) == -signal.SIGALRM
        finally:
            stuck.kill()


def test_what_is_of_no_use_any_more_ends_though_somebody_asks() -> None:
    ends: list[float] = []
    lifeline = Lifeline(60.0, lambda: ends.append(time.monotonic()))
    lifeline.asked()
    cut_at = time.monotonic()
    lifeline.cut(0.2)
    while not ends:
        assert time.monotonic() < cut_at + 60
        lifeline.asked()
        time.sleep(0.01)
    assert ends[0] - cut_at >= 0.19
