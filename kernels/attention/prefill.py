"""Prefill attention with sinks over paged KV, in Triton: many query tokens per sequence.

One program owns ``BLOCK_TOKENS`` query tokens of one kv head: the Q / G query heads of that kv head are
packed into the rows of the tile, so that keys are read once for all of them. Keys come page by page; a
sliding layer starts at the first page its window can see. The heaviest tiles (the last tokens) are launched
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.reference import PagedSequences

LOG2E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "len_ptr"],
)
def _prefill(
    q_ptr,
    kv_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    sink_ptr,
    out_ptr,
    page_stride,
    table_stride,
    sm_scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2)
    begin = tl.load(start_ptr + b)
    count = tl.load(start_ptr + b + 1) - begin
    length = tl.load(len_ptr + b)
    if block * BLOCK_TOKENS >= count:
        return
    rows: tl.constexpr = BLOCK_TOKENS * GROUP
    row = tl.arange(0, rows)
    token = block * BLOCK_TOKENS + row // GROUP
    head = g * GROUP + row % GROUP
    dims = tl.arange(0, DIM)
    at = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * DIM + dims[None, :]
    live = token < count
    query = tl.load(q_ptr + at, mask=live[:, None], other=0.0)
    query = (query.to(tl.float32) * sm_scale_log2).to(query.dtype)
    position = length - count + token
    m = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.full([rows], 1.0, tl.float32)
    acc = tl.zeros([rows, DIM], tl.float32)

    first_position = length - count + block * BLOCK_TOKENS
    end_key = tl.minimum(first_position + BLOCK_TOKENS, length)
    last_page = tl.cdiv(end_key, PAGE)
    if WINDOW > 0:
        first_page = tl.maximum(first_position - WINDOW + 1, 0) // PAGE
        clear_page = last_page  # near the edges of a window every page needs its mask
        masked_from = first_page
    else:
        first_page = 0
        clear_page = first_position // PAGE
        masked_from = clear_page

    offset = tl.arange(0, PAGE)
    page_at = offset[:, None] * DIM + dims[None, :]
    kv_base = kv_ptr + g * 2 * PAGE * DIM
    table_row = table_ptr + b * table_stride
    if WINDOW == 0:
        for i in tl.range(first_page, clear_page, num_stages=STAGES):
            page = tl.load(table_row + i).to(tl.int64)
            key = tl.load(kv_base + page * page_stride + page_at)
            value = tl.load(kv_base + page * page_stride + PAGE * DIM + page_at)
            scores = tl.dot(query, tl.trans(key))
            m_new = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            total = total * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(value.dtype), value, acc)
            m = m_new
    for i in tl.range(masked_from, last_page, num_stages=STAGES):
        page = tl.load(table_row + i).to(tl.int64)
        key_position = i * PAGE + offset
        written = key_position < length
        key = tl.load(kv_base + page * page_stride + page_at, mask=written[:, None], other=0.0)
        value = tl.load(kv_base + page * page_stride + PAGE * DIM + page_at, mask=written[:, None], other=0.0)
        visible = key_position[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= key_position[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, tl.dot(query, tl.trans(key)), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc)
        m = m_new
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])


def prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    sequences: PagedSequences,
    sinks: Tensor,
    window: int | None,
    sm_scale: float,
    max_query_tokens: int,
    block_tokens: int = 8,
    out: Tensor | None = None,
    warps: int | None = None,
    stages: int = 5,
) -> Tensor:
    """The fast twin of ``reference.paged_attention`` for many query tokens per sequence.

    Args:
        query: [T, Q, D] contiguous.
        kv_layer: [N, G, 2, S, D] view; the last four dimensions contiguous.
        max_query_tokens: upper bound of a sequence's query tokens in this batch; sizes the grid.
        block_tokens: query tokens per program; times Q / G it must be at least 16 rows.
        warps, stages: launch shape, for tuning.

    Returns:
        [T, Q, D]; tokens beyond ``query_start[B]`` are left as they are.

    Raises:
        ValueError: another shape or layout, or no sinks.
    """
    _, heads, dim = query.shape
    kv_heads, page_size = kv_layer.shape[1], kv_layer.shape[3]
    if not query.is_contiguous() or not kv_layer[0].is_contiguous():
        raise ValueError("query and the inner dimensions of kv_layer must be contiguous")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} kv heads")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)}, expected one a query head: {heads}")
    out = torch.empty_like(query) if out is None else out
    batch = sequences.kv_len.shape[0]
    rows = block_tokens * (heads // kv_heads)
    _prefill[(triton.cdiv(max_query_tokens, block_tokens), kv_heads, batch)](
        query,
        kv_layer,
        sequences.block_table,
        sequences.query_start,
        sequences.kv_len,
        sinks,
        out,
        kv_layer.stride(0),
        sequences.block_table.stride(0),
        sm_scale * LOG2E,
        HEADS=heads,
        GROUP=heads // kv_heads,
        PAGE=page_size,
        DIM=dim,
        BLOCK_TOKENS=block_tokens,
        WINDOW=window or 0,
        STAGES=stages,
        num_warps=warps or (8 if rows >= 128 else 4),
    )
    return out
