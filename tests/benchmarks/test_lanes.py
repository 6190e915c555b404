"""Jobs that share devices: how many at once, in which order, and what a failure leaves."""

from __future__ import annotations

import threading

import pytest

from antiphon.benchmarks.sweep.lanes import Job, run_at_once
from antiphon.protocol.errors import ConfigError

WAIT_S = 60.0


def test_small_jobs_run_side_by_side_and_large_ones_alone() -> None:
    together, log, lock = threading.Barrier(2), list[tuple[str, tuple[int, ...]]](), threading.Lock()

    def job(name: str, devices: int) -> Job:
        def run(numbers: tuple[int, ...]) -> None:
            if devices == 1:
                together.wait(WAIT_S)  # breaks unless both are at work at the same time
            with lock:
                log.append((name, numbers))

        return Job(name, devices, run)

    run_at_once([job("a", 1), job("large", 2), job("b", 1)], 2)
    assert sorted(log[:2]) in ([("a", (0,)), ("b", (1,))], [("a", (1,)), ("b", (0,))])
    assert log[2] == ("large", (0, 1))


def test_devices_are_never_shared() -> None:
    busy, lock, most = set[int](), threading.Lock(), list[int]()
    all_at_work = threading.Event()

    def run(numbers: tuple[int, ...]) -> None:
        with lock:
            assert not busy & set(numbers)
            busy.update(numbers)
            most.append(len(busy))
            if len(busy) == 4:
                all_at_work.set()
        assert all_at_work.wait(60), "some device is never used while others are"
        with lock:
            busy.difference_update(numbers)

    run_at_once([Job(str(index), 1 + index % 3, run) for index in range(30)], 4)
    assert len(most) == 30
    assert max(most) == 4
    assert not busy


def test_a_failure_is_raised_when_all_had_their_turn() -> None:
    done: list[int] = []

    def fail(numbers: tuple[int, ...]) -> None:
        raise ValueError("broken")

    jobs = [Job("bad", 1, fail), Job("good", 1, lambda numbers: done.append(1))]
    with pytest.raises(ValueError, match="broken"):
        run_at_once(jobs, 1)
    assert done == [1]


def test_what_can_never_fit_is_refused_before_anything_runs() -> None:
    done: list[int] = []
    job = Job("small", 1, lambda numbers: done.append(1))
    with pytest.raises(ConfigError, match="wide needs 3 devices, there are 2"):
        run_at_once([job, Job("wide", 3, job.run)], 2)
    assert not done
