"""Decode attention with sinks over FP8 pages, in Triton: the full layers of ``decode`` with another page.

Numbers are widened to the queries' dtype, which is exact; the scale of a key multiplies its scores, that of a
value its probabilities. Needs a GPU that knows e4m3 (sm_89 and later).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.attention.decode import LOG2E, choose_splits, load_query
from antiphon.kernels.attention.split_parts import SplitParts
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences


@triton.jit
def _attend_fp8_page(
    query,
    head_base,
    table_row,
    i,
    length,
    m,
    total,
    acc,
    page_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One page; with MASKED only its keys before ``length`` are visible (at least one is)."""
    offset = tl.arange(0, PAGE)
    at = offset[:, None] * DIM + tl.arange(0, DIM)[None, :]
    base = head_base + tl.load(table_row + i).to(tl.int64) * page_stride
    scales = (base + 2 * PAGE * DIM).to(tl.pointer_type(tl.bfloat16))
    if MASKED:
        visible = i * PAGE + offset < length
        key = tl.load(base + at, mask=visible[:, None], other=0)
        value = tl.load(base + PAGE * DIM + at, mask=visible[:, None], other=0)
        key_scale = tl.load(scales + offset, mask=visible, other=0.0)
        value_scale = tl.load(scales + PAGE + offset, mask=visible, other=0.0)
    else:
        key = tl.load(base + at)
        value = tl.load(base + PAGE * DIM + at)
        key_scale = tl.load(scales + offset)
        value_scale = tl.load(scales + PAGE + offset)
    key = key.to(tl.float8e4nv, bitcast=True).to(query.dtype)
    value = value.to(tl.float8e4nv, bitcast=True).to(query.dtype)
    scores = tl.dot(query, tl.trans(key)) * key_scale.to(tl.float32)[None, :]
    if MASKED:
        scores = tl.where(visible[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot((p * value_scale.to(tl.float32)[None, :]).to(value.dtype), value)
    return m_new, total, acc


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "len_ptr"])
def _decode_full_fp8(
    q_ptr,
    data_ptr,
    table_ptr,
    len_ptr,
    sink_ptr,
    out_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    page_stride,
    table_stride,
    sm_scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    b = tl.program_id(0)
    g = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(len_ptr + b)
    pages = tl.cdiv(length, PAGE)
    per_split = tl.cdiv(pages, SPLITS)
    first = tl.minimum(split * per_split, pages)
    last = tl.minimum(first + per_split, pages)
    head_base = data_ptr + g * HEAD_BYTES
    table_row = table_ptr + b * table_stride
    query, at, rows = load_query(q_ptr, b, g, sm_scale_log2, HEADS, GROUP, DIM)
    sink = (
        tl.load(sink_ptr + g * GROUP + rows, mask=rows < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
    )
    whole = tl.maximum(first, tl.minimum(last, length // PAGE))
    has_sink = split == 0
    m = tl.where(has_sink, sink, -1.0e30)
    total = tl.where(has_sink, 1.0, 0.0) + tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DIM], tl.float32)
    for i in tl.range(first, whole, num_stages=STAGES):
        m, total, acc = _attend_fp8_page(
            query, head_base, table_row, i, length, m, total, acc, page_stride, PAGE, DIM, False
        )
    if whole < last:
        m, total, acc = _attend_fp8_page(
            query, head_base, table_row, whole, length, m, total, acc, page_stride, PAGE, DIM, True
        )
    mask = rows < GROUP
    if SPLITS == 1:
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask[:, None])
    else:
        part = (b * HEADS + g * GROUP + rows) * SPLITS + split
        part_at = part[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(part_acc_ptr + part_at, acc, mask=mask[:, None])
        tl.store(part_max_ptr + part, m, mask=mask)
        tl.store(part_sum_ptr + part, total, mask=mask)


class Fp8DecodeAttention:
    """Decode attention of full layers for a fixed batch size; safe to capture in a CUDA graph.

    Args:
        batch_size: B, one query token per sequence.
        query_heads, kv_heads: Q and G; Q / G must be at most 16.
        splits: programs that share one sequence's keys; None chooses from the batch size.
    """

    def __init__(
        self,
        batch_size: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        splits: int | None = None,
    ) -> None:
        if query_heads % kv_heads or query_heads // kv_heads > 16:
            raise ValueError(f"{query_heads} query heads do not share {kv_heads} kv heads in groups of <= 16")
        self.batch_size = batch_size
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.splits = choose_splits(batch_size, kv_heads) if splits is None else splits
        self._parts = SplitParts(batch_size * query_heads, head_dim, self.splits, device, pdl=False)

    def full(
        self,
        query: Tensor,
        pages: Fp8Pages,
        sequences: PagedSequences,
        sinks: Tensor,
        sm_scale: float,
        out: Tensor,
    ) -> Tensor:
        """All keys. Shapes as in ``reference.paged_attention`` with T = B; writes and returns ``out``.

        Raises:
            ValueError: another shape, or no sinks.
        """
        check_decode(self.batch_size, self.query_heads, query, pages, sequences, sinks)
        _decode_full_fp8[(self.batch_size, self.kv_heads, self.splits)](
            query,
            pages.data,
            sequences.block_table,
            sequences.kv_len,
            sinks,
            out,
            self._parts.acc,
            self._parts.max,
            self._parts.sum,
            pages.data.stride(0),
            sequences.block_table.stride(0),
            sm_scale * LOG2E,
            HEADS=self.query_heads,
            GROUP=self.query_heads // self.kv_heads,
            PAGE=pages.page_size,
            DIM=self.head_dim,
            HEAD_BYTES=head_bytes(pages.page_size, self.head_dim),
            SPLITS=self.splits,
            STAGES=4,
            num_warps=1,
        )
        if self.splits > 1:
            self._parts.merge(out)
        return out


def check_decode(
    batch_size: int,
    query_heads: int,
    query: Tensor,
    pages: Fp8Pages,
    sequences: PagedSequences,
    sinks: Tensor,
) -> None:
    """Whether these are a decode step of so many sequences.

    Raises:
        ValueError: they are not; says what differs.
    """
    expected = (batch_size, query_heads, pages.head_dim)
    if tuple(query.shape) != expected or not query.is_contiguous() or query_heads % pages.shape[1]:
        raise ValueError(
            f"query is {tuple(query.shape)}, expected contiguous {expected} for {pages.shape[1]} kv heads"
        )
    if tuple(sinks.shape) != (query_heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)}, expected one a query head: {query_heads}")
    if sequences.kv_len.shape[0] != batch_size:
        raise ValueError(f"{sequences.kv_len.shape[0]} sequences, expected {batch_size}")
