"""The seam between the supervisor, which decides, and whatever runs processes.

``ray_cluster.py`` runs them as Ray actors; the supervisor's own tests run them as plain objects.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from antiphon.cluster.process_plan import ProcessSpec
from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.identity import Topology, WorkerAddress


class ProcessDied(AntiphonError):
    """The process behind a handle is gone; the message says how it was noticed."""


class StartFailed(AntiphonError):
    """A process could not start for a reason that trying again does not change; the message is the reason."""


class ProcessStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot of one process; the same for all roles."""

    worker_id: str
    ready: bool
    """Able to do its part of a request now."""
    detail: str
    """Why not ready; empty when ready."""
    failed: str | None
    """Set when the process cannot go on; it is replaced."""
    requests: int
    pages_held: int
    overdue_writers: tuple[tuple[str, int], ...] = ()
    """(worker id, epoch) of peers that may still write pages here though their lease has run out."""
    waiting: int = 0
    """Worker only: requests that hold no pages."""
    queued_prefill_tokens: int = 0
    """Worker only: prompt tokens that wait to be computed here."""
    computed_prompt_tokens: int = 0
    """Worker only: prompt tokens computed since the start."""
    page_use: float = 0.0
    """Worker only: share of its KV pages that requests hold, 0 to 1."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Router only: (prefill, decode) ids of workers that it sends requests to."""


class ProcessHandle(Protocol):
    """One life of one process. Every method raises ProcessDied once the process is gone."""

    async def start(self, topology: Topology) -> WorkerAddress:
        """Load and listen. Raises StartFailed when there is no point in trying again."""

    async def set_topology(self, topology: Topology) -> None:
        """Tell it who is alive."""

    async def status(self) -> ProcessStatus:
        """Ask how it is."""

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and finish what is held; True when nothing is left in time."""

    async def stop(self) -> None:
        """Let it end everything it started; the process itself may go on."""

    async def wait_dead(self) -> str:
        """Return the reason once the process is gone; never returns while it lives."""

    def kill(self) -> None:
        """End the process at once. Harmless when it is gone."""


class Launcher(Protocol):
    """Makes processes."""

    def launch(self, spec: ProcessSpec) -> ProcessHandle:
        """A new life of ``spec``, not started yet; returns at once."""

    async def make_room(self, spec: ProcessSpec) -> None:
        """Reserve what a process beyond the plan needs. Raises StartFailed when there is no room for it."""

    def free_room(self, spec: ProcessSpec) -> None:
        """Give back what ``make_room`` reserved; harmless for a process of the plan."""
