"""Which process of which machine it is, and whether it is there: what Ray says of an actor is no proof.

Ray counts an actor as dead the moment that it was asked to kill it. The process may live on, when nobody
reaches it: its links to Ray are cut, or its node is.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process; never equal to a later one with the same number."""

    machine: str
    """This boot of the kernel, and the namespace in which the number counts."""
    pid: int
    started_ticks: int
    """When, in clock ticks since the boot."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Of the process that asks.

        Raises:
            OSError: this machine has no /proc.
        """
        pid = os.getpid()
        started = _started_ticks(pid)
        if started is None:
            raise OSError(f"/proc/{pid}/stat does not tell when this process started")
        return cls(_machine(), pid, started)

    @property
    def is_here(self) -> bool:
        """Whether its number means the same process to whoever asks."""
        return self.machine == _machine()

    @property
    def lives(self) -> bool:
        """Whether it can still do anything. Only for one that ``is_here``."""
        return _started_ticks(self.pid) == self.started_ticks

    def kill(self) -> None:
        """End it, even when it is stopped. Harmless when it is gone. Only for one that ``is_here``."""
        if self.lives:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended meanwhile
                return


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started_ticks(pid: int) -> int | None:
    """None when the process is gone, or dead and only not waited for yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
