"""A sum over the GPUs of one host, residual add and RMSNorm in one launch, over memory they all can read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary, check_launch

LIBRARY = CudaLibrary("one_shot", (Path(__file__).with_name("one_shot.cu"),))
MAX_RANKS = 8
_WORD_BYTES = 4


@cache
def _library() -> ctypes.CDLL:
    library = LIBRARY.load()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.antiphon_reduce_add_norm.argtypes = [
        *(pointer, pointer, pointer, pointer, pointer, pointer, pointer, ctypes.c_float),
        *(number, number, number, number, number, pointer),
    ]
    return library


def peer_bytes(max_rows: int, width: int, ranks: int) -> int:
    """Bytes of the memory that each rank shares: two places for rows, then a word per row and rank."""
    return 2 * max_rows * width * 2 + max_rows * ranks * _WORD_BYTES


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
        ranks = len(memory_of)
        if ranks > MAX_RANKS or width % 8:
            raise ValueError(f"{ranks} ranks and {width} columns: at most {MAX_RANKS}, and a multiple of 8")
        self.max_rows = max_rows
        self._width, self._rank, self._ranks = width, rank, ranks
        pointers = ctypes.c_void_p * ranks
        self._rows_of = pointers(*memory_of)
        self._words_of = pointers(*(address + 2 * max_rows * width * 2 for address in memory_of))
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._launch = _library().antiphon_reduce_add_norm

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += sum of x over ranks`` in place, then its RMSNorm, which is returned.

        Args:
            x, residual: [T, width] bf16 contiguous, T at most ``max_rows``. weight: [width] bf16.

        Raises:
            ValueError: another shape or dtype.
        """
        rows = x.shape[0]
        for name, tensor in (("x", x), ("residual", residual)):
            if tuple(tensor.shape) != (rows, self._width) or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {(rows, self._width)}")
            if tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name} is {tensor.dtype}, expected bfloat16")
        if weight.dtype != torch.bfloat16 or tuple(weight.shape) != (self._width,):
            raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}")
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"{rows} rows, the memory is for 1 to {self.max_rows}")
        out = torch.empty_like(residual)
        status = self._launch(
            *(self._rows_of, self._words_of, x.data_ptr(), residual.data_ptr(), weight.data_ptr()),
            *(out.data_ptr(), self._counts.data_ptr(), eps, rows, self._width, self.max_rows),
            *(self._rank, self._ranks, torch.cuda.current_stream(x.device).cuda_stream),
        )
        check_launch(status, "reduce_add_norm")
        return out
