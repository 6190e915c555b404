"""Attention of a chunk in CUDA for sm_90, for GPT-OSS's heads: rotation and page writes, then attention with
sinks over paged KV.

The kernels are described in ``csrc``. Other shapes and devices take ``dense.rope`` and ``prefill``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary, check_launch
from antiphon.kernels.fp8_pages import Fp8Pages, KvLayer, pages_of
from antiphon.kernels.reference import PagedSequences

PAGE = 64
HEAD_DIM = 64
GROUP = 8
"""Query heads of a kv head."""

_SOURCES = Path(__file__).with_name("csrc")
LIBRARY = CudaLibrary(
    "prefill_attention",
    (_SOURCES / "prefill.cu", _SOURCES / "rope.cu"),
    headers=(
        _SOURCES / "fp8_pages.cuh",
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
        *(ctypes.c_float, *(number,) * 3, pointer),
    ]
    library.antiphon_chunk_rope.argtypes = [*(pointer,) * 6, ctypes.c_longlong, *(number,) * 5, pointer]
    return library


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def chunk_rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slot: Tensor,
    rotation: Tensor,
    kv_layer: KvLayer,
    query: Tensor,
    overlap: bool = False,
) -> Tensor:
    """Rotate q and k, write k and v to their pages, return ``query``; as ``dense.rope.rope_and_write``.

    Args:
        qkv: [T, (Q + 2 G) * 64] bf16 contiguous, bias added, 8 query heads per kv head.
        positions, slot: [T] int64; a negative slot is not stored.
        rotation: [positions, 32, 2] float32 from ``rotation_table``.
        kv_layer: [N, G, 2, S, 64] bf16 view, the last four dimensions contiguous; or FP8 pages.
        query: [T, Q, 64] bf16 contiguous, overwritten.
        overlap: the launch may begin while the one ahead ends, and lets the next one do so.

    Raises:
        ValueError: another shape, dtype or layout.
    """
    tokens = qkv.shape[0]
    kv_heads, _, page_size, width = kv_layer.shape[1:]
    for name, tensor, shape, dtype in (
        ("qkv", qkv, (tokens, (GROUP + 2) * kv_heads * HEAD_DIM), torch.bfloat16),
        ("query", query, (tokens, GROUP * kv_heads, HEAD_DIM), torch.bfloat16),
        ("positions", positions, (tokens,), torch.int64),
        ("slot", slot, (tokens,), torch.int64),
        ("rotation", rotation, (rotation.shape[0], HEAD_DIM // 2, 2), torch.float32),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous {dtype} {shape}"
            )
    fp8 = isinstance(kv_layer, Fp8Pages)
    pages, page_stride = pages_of(kv_layer)
    if width != HEAD_DIM or not (fp8 or (pages.dtype == torch.bfloat16 and pages[0].is_contiguous())):
        raise ValueError(f"kv_layer is {tuple(kv_layer.shape)} {pages.dtype}, expected [N, G, 2, S, 64]")
    status = _library().antiphon_chunk_rope(
        *(qkv.data_ptr(), positions.data_ptr(), slot.data_ptr(), rotation.data_ptr(), query.data_ptr()),
        *(pages.data_ptr(), page_stride, tokens, kv_heads, page_size, int(fp8), int(overlap)),
        torch.cuda.current_stream().cuda_stream,
    )
    check_launch(status, "rotation")
    return query


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
    overlap: bool = False,
) -> Tensor:
    """The fast twin of ``reference.paged_attention`` for many query tokens per sequence.

    Args:
        query: [T, Q, 64] bf16 contiguous, 8 query heads per kv head.
        kv_layer: [N, G, 2, 64, 64] bf16 view; the last four dimensions contiguous.
        sinks: [Q] float32.
        window: keys a query sees, itself included, at least a page of them; None: all before it.
        sm_scale: of the scores, positive.
        max_query_tokens: upper bound of a sequence's query tokens in this batch; sizes the work list.
        ordered: the warpgroups issue their products in turn.
        overlap: the launch may begin while the one ahead ends.

    Returns:
        [T, Q, 64]; tokens beyond ``query_start[B]`` are left as they are.

    Raises:
        ValueError: another shape, dtype or layout, or a shorter window.
        KernelLibraryError: the library was not built.
    """
    # A page that no query sees is replaced by a seen one, which must be whole: then unwritten rows stay out.
    if window is not None and window < PAGE:
        raise ValueError(f"a window of {window}, the kernel takes {PAGE} and more")
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
        *(_processors(query.device), int(ordered), int(overlap), torch.cuda.current_stream().cuda_stream),
    )
    check_launch(status, "prefill attention")
    return out
