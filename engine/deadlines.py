"""The deadlines of live sequences, earliest first."""

from __future__ import annotations

import heapq


class Deadlines:
    """A heap of (deadline, arrival, request id); an entry of an ended sequence goes when it comes to the top.

    Entries name requests instead of holding them, so that a far deadline keeps no ended text in memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, deadline_s: float, arrival: int, request_id: str) -> None:
        """Watch one sequence."""
        heapq.heappush(self._heap, (deadline_s, arrival, request_id))

    def first(self) -> tuple[float, int, str] | None:
        """The earliest entry."""
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        """Drop the earliest entry."""
        heapq.heappop(self._heap)
