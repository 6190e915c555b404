"""Jobs that share the devices of a machine: as many at once as fit, in their order otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do on so many devices."""

    name: str
    devices: int
    run: Callable[[tuple[int, ...]], None]
    """Given the numbers of its devices."""


class _Devices:
    """Which are free; jobs give theirs back from threads of their own."""

    def __init__(self, count: int) -> None:
        self.free = set(range(count))
        self.running = 0
        self.failures: list[BaseException] = []
        self.changed = threading.Condition()

    def take(self, count: int) -> tuple[int, ...]:
        """The lowest free ones; to be called with ``changed`` held."""
        taken = tuple(sorted(self.free)[:count])
        self.free -= set(taken)
        self.running += 1
        return taken

    def run(self, job: Job, taken: tuple[int, ...]) -> None:
        """The whole life of a job's thread."""
        failure: BaseException | None = None
        try:
            job.run(taken)
        except BaseException as error:  # raised again by whoever waits for all
            failure = error
        with self.changed:
            self.failures += [failure] if failure is not None else []
            self.free |= set(taken)
            self.running -= 1
            self.changed.notify_all()


def run_at_once(jobs: Sequence[Job], devices: int) -> None:
    """Run every job, each as soon as enough devices are free and none before it in the order could take them.

    A job that waits for more devices than are free lets smaller ones after it go ahead. One that raises
    leaves the others their turn; the first such error is raised when all have ended.

    Raises:
        ConfigError: a job needs more devices than there are.
    """
    for job in jobs:
        if not 0 < job.devices <= devices:
            raise ConfigError(f"{job.name} needs {job.devices} devices, there are {devices}")
    state = _Devices(devices)
    waiting = list(jobs)
    with state.changed:
        while waiting or state.running:
            fitting = next((job for job in waiting if job.devices <= len(state.free)), None)
            if fitting is None:
                state.changed.wait()
                continue
            waiting.remove(fitting)
            taken = state.take(fitting.devices)
            # A daemon, so that an interrupted command ends; what its jobs started is interrupted with it.
            threading.Thread(target=state.run, args=(fitting, taken), name=fitting.name, daemon=True).start()
    if state.failures:
        raise state.failures[0]
