"""What the sums over peer memory have in common: their library, and what they ask of their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary

_HERE = Path(__file__).parent
LIBRARY = CudaLibrary(
    "peer_reduce",
    (_HERE / "one_shot.cu", _HERE / "two_shot.cu"),
    headers=(_HERE / "peer_reduce.cuh", _HERE.parent / "moe" / "csrc" / "hopper.cuh"),
)
MAX_RANKS = 8
WORD_BYTES = 4


@cache
def library() -> ctypes.CDLL:
    """The launchers, with the types of their arguments.

    Raises:
        KernelLibraryError: the library was not built.
    """
    found = LIBRARY.load()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    tensors = (pointer,) * 5
    sizes = (ctypes.c_float, *(number,) * 5, pointer)
    found.antiphon_one_shot_add_norm.argtypes = [pointer, pointer, *tensors, *sizes[:-1], number, pointer]
    found.antiphon_two_shot_add_norm.argtypes = [pointer, pointer, pointer, pointer, *tensors, *sizes]
    return found


def check_ranks(ranks: int, width: int) -> None:
    """Refuse what no kernel here takes.

    Raises:
        ValueError: more ranks, or another width.
    """
    if not 1 <= ranks <= MAX_RANKS or width % 8:
        raise ValueError(f"{ranks} ranks and {width} columns: at most {MAX_RANKS}, and a multiple of 8")


def check_tensors(x: Tensor, residual: Tensor, weight: Tensor, max_rows: int, width: int) -> None:
    """Refuse what a launch would read or write wrongly.

    Raises:
        ValueError: another shape or dtype, or more rows than there is memory for.
    """
    rows = x.shape[0]
    for name, tensor in (("x", x), ("residual", residual)):
        if tuple(tensor.shape) != (rows, width) or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {(rows, width)}")
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}, expected bfloat16")
    if weight.dtype != torch.bfloat16 or tuple(weight.shape) != (width,):
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}")
    if not 1 <= rows <= max_rows:
        raise ValueError(f"{rows} rows, the memory is for 1 to {max_rows}")


def places(memory_of: Sequence[int], offset_bytes: int) -> ctypes.Array[ctypes.c_void_p]:
    """The same place in the memory of every rank, as a launcher takes it."""
    return (ctypes.c_void_p * len(memory_of))(*(address + offset_bytes for address in memory_of))
