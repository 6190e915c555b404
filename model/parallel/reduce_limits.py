"""Up to how many rows a sum over ranks takes which way: the one table of the crossovers.

``python -m antiphon.benchmarks.rank_steps --parts sums`` measures all ways over all sizes and prints the
limits that belong here. Of two ranks they were: on two H200s one shot takes 6.5 us for one row and 211 us for
8,192, NCCL with a fused add and norm 11.7 and 231, two shots more than either. Of more ranks none has been
measured yet: 64 rows are half of what a decode step may have.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.kernels.collectives.one_shot import peer_bytes
from antiphon.kernels.collectives.two_shot import two_shot_bytes


@dataclass(frozen=True, slots=True)
class ReduceLimits:
    """Rows of one sum; beyond them the communicator's all-reduce and a fused add and norm take over.

    Attributes:
        one_shot_rows: up to here every rank reads every rank's rows.
        two_shot_rows: beyond, up to here, each row is summed by one rank; 0 for never.
    """

    one_shot_rows: int
    two_shot_rows: int = 0

    @property
    def max_rows(self) -> int:
        """Most rows that take one launch."""
        return max(self.one_shot_rows, self.two_shot_rows)

    def shared_bytes(self, width: int, ranks: int) -> int:
        """Of each rank's GPU, for sums of rows of so many columns."""
        return peer_bytes(self.one_shot_rows, width, ranks) + two_shot_bytes(self.two_shot_rows, width, ranks)


BY_RANKS: dict[int, ReduceLimits] = {
    2: ReduceLimits(8192),
    4: ReduceLimits(64),
    8: ReduceLimits(64),
}
"""Ranks of a worker -> its limits."""


def limits_of(ranks: int) -> ReduceLimits:
    """The limits of so many ranks: those of the next larger number that was measured."""
    return BY_RANKS[min((size for size in BY_RANKS if size >= ranks), default=max(BY_RANKS))]
