"""Who may write which request's pages. At most one writer per request and attempt, known by its epoch.

    granted     the writer may write until the set is complete or it says that it stopped
    cancelled   the writer was told to stop; its pages stay set aside until it says it has, or is known dead

A lease ends only on the writer's word (complete, drained, failed) or on certain knowledge that this life of
the writer is over. There is no timer here on purpose: a page that a peer may still write is never reused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.protocol.errors import IllegalTransition


@dataclass(frozen=True, slots=True, order=True)
class Writer:
    """One life of one prefill worker."""

    worker_id: str
    epoch: int


@dataclass(slots=True)
class WriteLease:
    """One writer's right to write one attempt's pages."""

    request_id: str
    attempt: int
    writer: Writer
    cancelled: bool = field(default=False)


class WriteLeases:
    """All leases of one decode worker."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, int], WriteLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, request_id: str, attempt: int) -> WriteLease | None:
        """The lease on an attempt's pages, if somebody has one."""
        return self._leases.get((request_id, attempt))

    def grant(self, request_id: str, attempt: int, writer: Writer) -> WriteLease:
        """Make this the only writer.

        Raises:
            IllegalTransition: somebody already has, or had and has not stopped.
        """
        held = self._leases.get((request_id, attempt))
        if held is not None:
            raise IllegalTransition(f"{request_id} attempt {attempt} is leased to {held.writer.worker_id}")
        lease = WriteLease(request_id, attempt, writer)
        self._leases[request_id, attempt] = lease
        return lease

    def cancel(self, request_id: str, attempt: int) -> Writer | None:
        """Withdraw the right; returns whom to tell, None when there is no writer to wait for."""
        lease = self._leases.get((request_id, attempt))
        if lease is None:
            return None
        lease.cancelled = True
        return lease.writer

    def end(self, request_id: str, attempt: int, writer: Writer) -> bool:
        """This writer writes no more. False when it has no such lease: a repeat, or a stale message."""
        lease = self._leases.get((request_id, attempt))
        if lease is None or lease.writer != writer:
            return False
        del self._leases[request_id, attempt]
        return True

    def of_writer(self, writer: Writer) -> list[WriteLease]:
        """Leases of one life of a worker."""
        return [lease for lease in self._leases.values() if lease.writer == writer]

    def end_of_life(self, living: set[Writer]) -> list[WriteLease]:
        """End the leases of every writer that is not among the living; returns them.

        ``living`` must come from whoever starts and kills workers: silence alone does not make a writer dead.
        """
        ended = [lease for lease in self._leases.values() if lease.writer not in living]
        for lease in ended:
            del self._leases[lease.request_id, lease.attempt]
        return ended
