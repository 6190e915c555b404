"""Copies between KV pages and contiguous memory on the GPU, one launch for hundreds of pages."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary, check_launch

_HERE = Path(__file__).parent
LIBRARY = CudaLibrary(
    "page_copy", (_HERE / "page_copy.cu",), headers=(_HERE / "moe" / "csrc" / "hopper.cuh",)
)
WORD_BYTES = 16


@cache
def _launcher() -> Any:
    function = LIBRARY.load().antiphon_page_copy
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    layout = (size, size, number, size, number)
    function.argtypes = [pointer, pointer, *layout, pointer, number, number, pointer]
    return function


def load() -> None:
    """Load the library now.

    Raises:
        KernelLibraryError: it was not built.
    """
    _launcher()


def copy_pages(chosen: Tensor, pages: Sequence[int], staged: Tensor, stream: int, *, gather: bool) -> None:
    """Move the same part of some pages to or from contiguous memory, in the order of ``pages``.

    Args:
        chosen: [N, L, H, B] uint8 view, some layers and heads of all N pages; heads and bytes are dense.
        staged: [len(pages) * L * H * B] uint8, dense.
        stream: of CUDA, on the current device.
        gather: pages into ``staged``; otherwise the other way.

    Raises:
        ValueError: another shape, or bytes that are no multiple of 16.
        RuntimeError: one of the pages does not exist, or CUDA refused the launch.
    """
    _, layers, heads, head_bytes = chosen.shape
    run_bytes, runs = heads * head_bytes, layers
    if chosen.stride(1) == run_bytes:  # all heads: the layers are one run
        run_bytes, runs = layers * run_bytes, 1
    dense = chosen.stride(3) == 1 and chosen.stride(2) == head_bytes and staged.is_contiguous()
    strides = chosen.stride(0), chosen.stride(1)
    if not dense or staged.numel() != len(pages) * runs * run_bytes:
        raise ValueError(f"{tuple(chosen.shape)} of {len(pages)} pages do not fill {staged.numel()} bytes")
    if any(each % WORD_BYTES for each in (*strides, run_bytes, chosen.data_ptr(), staged.data_ptr())):
        raise ValueError(f"pages and runs of {(*strides, run_bytes)} bytes: no multiples of {WORD_BYTES}")
    listed = array("i", pages)
    status = _launcher()(
        *(chosen.data_ptr(), staged.data_ptr(), *strides, runs, run_bytes),
        *(chosen.shape[0], listed.buffer_info()[0], len(listed), int(gather), stream),
    )
    check_launch(status, "page_copy")


def serves(device: torch.device) -> bool:
    """Whether pages of a device are copied by this: an H200's; others take torch's copies."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
