"""Which row of the device's tables belongs to which sequence.

A sequence keeps its row from step to step as long as it can, so that only what changed about it is written
again. Rows of a step are always 0 .. B - 1: when somebody leaves, the hole goes to a newcomer, or to one
whose row lies beyond the end.
"""

from __future__ import annotations

from antiphon.engine.sequence import Sequence


class BatchRows:
    """Assigns rows, one step after the other."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._rows: list[int] = []
        self.row_of: dict[Sequence, int] = {}
        """The rows of the last step; a new dict whenever anything changes."""
        self.version = 0
        """Counts the steps whose rows differ from those of the step before."""

    def assign(self, sequences: list[Sequence]) -> list[int]:
        """The row of each sequence of a step: a permutation of 0 .. B - 1."""
        if sequences == self._sequences:
            return self._rows
        count, before = len(sequences), self.row_of
        kept = {s: row for s in sequences if (row := before.get(s, count)) < count}
        taken = set(kept.values())
        free = (row for row in range(count) if row not in taken)
        self.row_of = {s: kept[s] if s in kept else next(free) for s in sequences}
        self._sequences = list(sequences)
        self._rows = list(self.row_of.values())
        self.version += 1
        return self._rows
