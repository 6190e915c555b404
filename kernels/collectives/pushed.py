"""As ``one_shot``, with rows written into the other ranks' memory instead of read from it.

As much goes over the links, and nobody waits for a read to come back; each rank has room for the rows of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.kernels.collectives.peer_reduce import WORD_BYTES, check_ranks, check_tensors, library, places
from antiphon.kernels.cuda_library import check_launch


def pushed_bytes(max_rows: int, width: int, ranks: int) -> int:
    """Bytes that each rank shares: two places for the rows of each rank, then a word per row and rank."""
    return 2 * ranks * max_rows * width * 2 + max_rows * ranks * WORD_BYTES


class PushedReduce:
    """One rank's end; arguments, calls and errors as of ``OneShotReduce``, memory of ``pushed_bytes``."""

    def __init__(
        self, memory_of: Sequence[int], rank: int, max_rows: int, width: int, device: torch.device
    ) -> None:
        check_ranks(len(memory_of), width)
        self.max_rows = max_rows
        self._width, self._rank, self._ranks = width, rank, len(memory_of)
        self._rows_of = places(memory_of, 0)
        self._words_of = places(memory_of, 2 * self._ranks * max_rows * width * 2)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._launch = library().antiphon_pushed_add_norm

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``OneShotReduce.add_norm_``."""
        check_tensors(x, residual, weight, self.max_rows, self._width)
        out = torch.empty_like(residual)
        status = self._launch(
            *(self._rows_of, self._words_of, x.data_ptr(), residual.data_ptr(), weight.data_ptr()),
            *(out.data_ptr(), self._counts.data_ptr(), eps, x.shape[0], self._width, self.max_rows),
            *(self._rank, self._ranks, torch.cuda.current_stream(x.device).cuda_stream),
        )
        check_launch(status, "pushed_add_norm")
        return out
