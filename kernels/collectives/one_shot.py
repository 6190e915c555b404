"""A sum over the GPUs of one host, residual add and RMSNorm in one launch, over memory they all can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.kernels.collectives.peer_reduce import WORD_BYTES, check_ranks, check_tensors, library, places
from antiphon.kernels.cuda_library import check_launch


def peer_bytes(max_rows: int, width: int, ranks: int) -> int:
    """Bytes of the memory that each rank shares: two places for rows, then a word per row and rank."""
    return 2 * max_rows * width * 2 + max_rows * ranks * WORD_BYTES


class OneShotReduce:
    """One rank's end. Every rank makes the same calls with the same shapes, on one stream each.

    Args:
        memory_of: address of each rank's shared memory of ``peer_bytes``, as this rank sees it; its words are
            zero on every rank before the first call of any.
        rank: this one.
        max_rows, width: largest matrix; ``width`` is a multiple of 8.

    Raises:
        ValueError: more ranks than the kernel takes, or a width that it does not.
        KernelLibraryError: the library was not built.
    """

    def __init__(
        self, memory_of: Sequence[int], rank: int, max_rows: int, width: int, device: torch.device
    ) -> None:
        check_ranks(len(memory_of), width)
        self.max_rows = max_rows
        self._width, self._rank, self._ranks = width, rank, len(memory_of)
        self._rows_of = places(memory_of, 0)
        self._words_of = places(memory_of, 2 * max_rows * width * 2)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._launch = library().antiphon_one_shot_add_norm

    def add_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
    ) -> Tensor:
        """``residual += sum of x over ranks`` in place, then its RMSNorm, which is returned.

        Args:
            x, residual: [T, width] bf16 contiguous, T at most ``max_rows``. weight: [width] bf16.
            overlap: the launch may begin while the one ahead ends, and lets the next one do so.

        Raises:
            ValueError: another shape or dtype.
        """
        check_tensors(x, residual, weight, self.max_rows, self._width)
        out = torch.empty_like(residual)
        status = self._launch(
            *(self._rows_of, self._words_of, x.data_ptr(), residual.data_ptr(), weight.data_ptr()),
            *(out.data_ptr(), self._counts.data_ptr(), eps, x.shape[0], self._width, self.max_rows),
            *(self._rank, self._ranks, int(overlap), torch.cuda.current_stream(x.device).cuda_stream),
        )
        check_launch(status, "one_shot_add_norm")
        return out
