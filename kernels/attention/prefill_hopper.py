"""Prefill attention with sinks over paged KV, in CUDA for sm_90: GPT-OSS's heads, pages of 64 positions.

The kernel is described in ``csrc/prefill.cu``. Other shapes and devices take ``prefill.prefill_attention``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary, check_launch
from antiphon.kernels.reference import PagedSequences

PAGE = 64
HEAD_DIM = 64
GROUP = 8
"""Query heads of a kv head."""

_SOURCES = Path(__file__).with_name("csrc")
LIBRARY = CudaLibrary(
    "prefill_attention",
    (_SOURCES / "prefill.cu",),
    headers=(
        _SOURCES / "prefill_pipeline.cuh",
        _SOURCES / "wgmma_bf16.cuh",
        _SOURCES.parent.parent / "moe" / "csrc" / "hopper.cuh",
    ),
)


@cache
def _library() -> ctypes.CDLL:
    library = LIBRARY.load()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.antiphon_prefill_attention.argtypes = [
        *(*(pointer,) * 7, number, number, ctypes.c_longlong, *(number,) * 4),
        *(ctypes.c_float, number, number, pointer),
    ]
    return library


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def hopper_prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    sequences: PagedSequences,
    sinks: Tensor,
    window: int | None,
    sm_scale: float,
    max_query_tokens: int,
    out: Tensor | None = None,
    ordered: bool = True,
) -> Tensor:
    """The fast twin of ``reference.paged_attention`` for many query tokens per sequence.

    Args:
        query: [T, Q, 64] bf16 contiguous, 8 query heads per kv head.
        kv_layer: [N, G, 2, 64, 64] bf16 view; the last four dimensions contiguous.
        sinks: [Q] float32.
        sm_scale: of the scores, positive.
        max_query_tokens: upper bound of a sequence's query tokens in this batch; sizes the work list.
        ordered: the warpgroups issue their products in turn.

    Returns:
        [T, Q, 64]; tokens beyond ``query_start[B]`` are left as they are.

    Raises:
        ValueError: another shape, dtype or layout.
        KernelLibraryError: the library was not built.
    """
    tokens, heads, _ = query.shape
    pages, kv_heads = kv_layer.shape[:2]
    out = torch.empty_like(query) if out is None else out
    for name, tensor in (("query", query), ("out", out)):
        if tuple(tensor.shape) != (tokens, kv_heads * GROUP, HEAD_DIM) or tensor.dtype != torch.bfloat16:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected bfloat16 [T, {kv_heads * GROUP}, "
                f"{HEAD_DIM}] for {kv_heads} kv heads"
            )
    if tuple(kv_layer.shape[2:]) != (2, PAGE, HEAD_DIM) or kv_layer.dtype != torch.bfloat16:
        raise ValueError(
            f"kv_layer is {tuple(kv_layer.shape)} {kv_layer.dtype}, expected bfloat16 "
            f"[N, G, 2, {PAGE}, {HEAD_DIM}]"
        )
    if not (query.is_contiguous() and out.is_contiguous() and kv_layer[0].is_contiguous()):
        raise ValueError("query, out and the inner dimensions of kv_layer must be contiguous")
    if sinks.dtype != torch.float32 or tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)} {sinks.dtype}, expected float32 [{heads}]")
    status = _library().antiphon_prefill_attention(
        *(query.data_ptr(), kv_layer.data_ptr(), sinks.data_ptr(), sequences.block_table.data_ptr()),
        *(sequences.query_start.data_ptr(), sequences.kv_len.data_ptr(), out.data_ptr()),
        *(pages, kv_heads, kv_layer.stride(0), sequences.block_table.stride(0)),
        *(sequences.kv_len.shape[0], max_query_tokens, window or 0, sm_scale),
        *(_processors(query.device), int(ordered), torch.cuda.current_stream().cuda_stream),
    )
    check_launch(status, "prefill attention")
    return out
