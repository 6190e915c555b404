"""Graphs of rank 0 whose replay has the other ranks replay theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from antiphon.protocol.errors import RankLostError


class Captured(Protocol):
    """Work that can be issued again and again, in fixed memory."""

    output: Tensor

    def replay(self) -> None:
        """Issue it; ``output`` is overwritten."""


class CapturedParts(Protocol):
    """The same, part after part."""

    output: Tensor

    def replay(self, after_part: Callable[[int], None]) -> None:
        """Issue it; ``after_part(i)`` is called when the i-th part was issued."""


class GraphOverRanks:
    """Implements ``Captured``.

    Args:
        captured: rank 0's.
        on_all: replays it here, and the others' theirs.
    """

    def __init__(self, captured: Captured, on_all: Callable[[Captured], None]) -> None:
        self.output = captured.output
        self._captured: Captured | None = captured
        self._on_all = on_all

    def replay(self) -> None:
        """See Captured.

        Raises:
            RankLostError: it was released, or another rank died or hangs.
        """
        if self._captured is None:
            raise RankLostError("a graph over ranks that were left")
        self._on_all(self._captured)

    def release(self) -> None:
        """Let go of rank 0's graph: NCCL's communicator does not end before those that hold its kernels."""
        self._captured = None


class PartsOverRanks:
    """Implements ``CapturedParts``; one command has the other ranks replay all of theirs."""

    def __init__(
        self, captured: CapturedParts, on_all: Callable[[CapturedParts, Callable[[int], None]], None]
    ) -> None:
        self.output = captured.output
        self._captured: CapturedParts | None = captured
        self._on_all = on_all

    def replay(self, after_part: Callable[[int], None]) -> None:
        """See CapturedParts.

        Raises:
            RankLostError: it was released, or another rank died or hangs.
        """
        if self._captured is None:
            raise RankLostError("a graph over ranks that were left")
        self._on_all(self._captured, after_part)

    def release(self) -> None:
        """See GraphOverRanks."""
        self._captured = None
