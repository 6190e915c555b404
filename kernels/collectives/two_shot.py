"""As ``one_shot``, for more rows: each row is summed by one rank, which hands the sum to all, in one launch.

Over the links go 2 (ranks - 1) / ranks times the matrix for each rank instead of ranks - 1 times, so with two
ranks it moves as much and waits longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.kernels.collectives.peer_reduce import WORD_BYTES, check_ranks, check_tensors, library, places
from antiphon.kernels.cuda_library import check_launch


def two_shot_bytes(max_rows: int, width: int, ranks: int) -> int:
    """Bytes that each rank shares: rows, sums, then words: one per row and rank, one per row."""
    return 2 * max_rows * width * 2 + max_rows * (ranks + 1) * WORD_BYTES


class TwoShotReduce:
    """One rank's end; arguments, calls and errors as of ``OneShotReduce``, memory of ``two_shot_bytes``."""

    def __init__(
        self, memory_of: Sequence[int], rank: int, max_rows: int, width: int, device: torch.device
    ) -> None:
        check_ranks(len(memory_of), width)
        self.max_rows = max_rows
        self._width, self._rank, self._ranks = width, rank, len(memory_of)
        matrix = max_rows * width * 2
        self._rows_of, self._sums_of = places(memory_of, 0), places(memory_of, matrix)
        self._parts_word_of = places(memory_of, 2 * matrix)
        self._sum_word_of = places(memory_of, 2 * matrix + max_rows * self._ranks * WORD_BYTES)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._launch = library().antiphon_two_shot_add_norm

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``OneShotReduce.add_norm_``."""
        check_tensors(x, residual, weight, self.max_rows, self._width)
        out = torch.empty_like(residual)
        status = self._launch(
            *(self._rows_of, self._sums_of, self._parts_word_of, self._sum_word_of, x.data_ptr()),
            *(residual.data_ptr(), weight.data_ptr(), out.data_ptr(), self._counts.data_ptr(), eps),
            *(x.shape[0], self._width, self.max_rows, self._rank, self._ranks),
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        check_launch(status, "two_shot_add_norm")
        return out
