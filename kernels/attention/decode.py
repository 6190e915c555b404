"""Decode attention with sinks over paged KV, in Triton: one query token per sequence.

Full layers split the keys of a sequence over several programs, and ``split_parts`` merges what they found.
Sliding layers read at most ``window`` keys and need one program per sequence and kv head, all keys at once.
The sink enters the online softmax as the starting maximum (weight 1 in the denominator) of the first split
only, so it counts once for any number of splits.

Measured facts behind the shape of these kernels: 16-row tiles with one warp per program and many programs
win; the page-index load eats pipeline stages, so 5 stages mean two K/V buffers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.attention.split_parts import SplitParts, launch_options
from antiphon.kernels.reference import PagedSequences

LOG2E = 1.4426950408889634
_PREFETCHED_PAGES = 4
"""Of a split: of eight sequences of 8,192 tokens 21 MB, which L2 holds beside the weights."""
_CROWDED_BATCH = 16
"""Up to which an SM has room for one program at most beside QKV; those that QKV leaves first take six."""


@triton.jit
def _attend_pages(
    query,
    kv_base,
    table_row,
    first_page,
    last_page,
    m,
    total,
    acc,
    page_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over whole pages [first_page, last_page); every key in them is visible."""
    at = tl.arange(0, PAGE)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    for i in tl.range(first_page, last_page, num_stages=STAGES):
        page = tl.load(table_row + i).to(tl.int64)
        key = tl.load(kv_base + page * page_stride + at)
        value = tl.load(kv_base + page * page_stride + PAGE * DIM + at)
        scores = tl.dot(query, tl.trans(key))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value)
        m = m_new
    return m, total, acc


@triton.jit
def _attend_page_masked(
    query,
    kv_base,
    table_row,
    i,
    first_key,
    length,
    m,
    total,
    acc,
    page_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
):
    """One page of which only the keys ``first_key <= k < length`` are visible (at least one is)."""
    offset = tl.arange(0, PAGE)
    position = i * PAGE + offset
    visible = (position >= first_key) & (position < length)
    at = offset[:, None] * DIM + tl.arange(0, DIM)[None, :]
    page = tl.load(table_row + i).to(tl.int64)
    key = tl.load(kv_base + page * page_stride + at, mask=visible[:, None], other=0.0)
    value = tl.load(kv_base + page * page_stride + PAGE * DIM + at, mask=visible[:, None], other=0.0)
    scores = tl.where(visible[None, :], tl.dot(query, tl.trans(key)), float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value)
    return m_new, total, acc


@triton.jit
def _prefetch_page(kv_base, page, page_stride, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Have L2 fetch a page's keys and values of one head; a line of 128 bytes is a token."""
    line = (kv_base + page.to(tl.int64) * page_stride + tl.arange(0, 2 * PAGE) * DIM).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_query(q_ptr, b, g, sm_scale_log2, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    rows = tl.arange(0, 16)
    at = (b * HEADS + g * GROUP + rows)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    query = tl.load(q_ptr + at, mask=rows[:, None] < GROUP, other=0.0)
    return (query.to(tl.float32) * sm_scale_log2).to(query.dtype), at, rows


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "len_ptr"])
def _decode_full(
    q_ptr,
    kv_ptr,
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
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    b = tl.program_id(0)
    g = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(len_ptr + b)
    pages = tl.cdiv(length, PAGE)
    per_split = tl.cdiv(pages, SPLITS)
    first = tl.minimum(split * per_split, pages)
    last = tl.minimum(first + per_split, pages)
    kv_base = kv_ptr + g * 2 * PAGE * DIM
    table_row = table_ptr + b * table_stride
    if PDL:
        if SPLITS > 1:
            # All keys but the last were there before the launch ahead: the first pages come while it runs.
            for i in range(first, tl.minimum(last, first + PREFETCHED)):
                _prefetch_page(kv_base, tl.load(table_row + i), page_stride, PAGE, DIM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query, at, rows = load_query(q_ptr, b, g, sm_scale_log2, HEADS, GROUP, DIM)
    sink = (
        tl.load(sink_ptr + g * GROUP + rows, mask=rows < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
    )
    whole = tl.maximum(first, tl.minimum(last, length // PAGE))
    has_sink = split == 0
    m = tl.where(has_sink, sink, -1.0e30)
    total = tl.where(has_sink, 1.0, 0.0) + tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DIM], tl.float32)
    m, total, acc = _attend_pages(
        query, kv_base, table_row, first, whole, m, total, acc, page_stride, PAGE, DIM, STAGES
    )
    if whole < last:
        m, total, acc = _attend_page_masked(
            query, kv_base, table_row, whole, 0, length, m, total, acc, page_stride, PAGE, DIM
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


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "len_ptr"])
def _decode_sliding(
    q_ptr,
    kv_ptr,
    table_ptr,
    len_ptr,
    sink_ptr,
    out_ptr,
    page_stride,
    table_stride,
    sm_scale_log2,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence and kv head; its window's keys at once, not page by page.

    With PDL all but the newest are loaded before the launch ahead is over: they were there before it began.
    """
    b = tl.program_id(0)
    g = tl.program_id(1)
    length = tl.load(len_ptr + b)
    position = tl.maximum(length - WINDOW, 0) + tl.arange(0, WINDOW)
    visible = position < length
    page = tl.load(table_ptr + b * table_stride + position // PAGE, mask=visible, other=0).to(tl.int64)
    row = page * page_stride + g * 2 * PAGE * DIM + position % PAGE * DIM
    key_ptr = kv_ptr + row[:, None] + tl.arange(0, DIM)[None, :]
    older = visible & (position + 1 < length) if PDL else visible
    key = tl.load(key_ptr, mask=older[:, None], other=0.0)
    value = tl.load(key_ptr + PAGE * DIM, mask=older[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        newest = (position + 1 == length)[:, None]
        key = tl.where(newest, tl.load(key_ptr, mask=newest, other=0.0), key)
        value = tl.where(newest, tl.load(key_ptr + PAGE * DIM, mask=newest, other=0.0), value)
    query, at, rows = load_query(q_ptr, b, g, sm_scale_log2, HEADS, GROUP, DIM)
    sink = (
        tl.load(sink_ptr + g * GROUP + rows, mask=rows < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
    )
    scores = tl.where(visible[None, :], tl.dot(query, tl.trans(key)), float("-inf"))
    m = tl.maximum(sink, tl.max(scores, 1))
    p = tl.exp2(scores - m[:, None])
    total = tl.exp2(sink - m) + tl.sum(p, 1)
    out = tl.dot(p.to(value.dtype), value) / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(rows < GROUP)[:, None])


class DecodeAttention:
    """Decode attention for a fixed batch size, with its scratch memory; safe to capture in a CUDA graph.

    Args:
        batch_size: B, one query token per sequence.
        query_heads, kv_heads: Q and G; Q / G must be at most 16.
        splits: programs that share one sequence's keys in a full layer; None chooses from the batch size.
        pdl: programmatic dependent launch (sm_90 and a launch chain that allows it).
        stages: of a full layer's pipeline; 5, 7 and 9 hold 2, 3 and 4 pages of a program in shared memory, so
            that 6, 4 and 3 programs find room on an SM. None chooses from the splits.
        ahead: with pdl, whether a full layer's programs may be placed before the launch ahead is over. None:
            only where that launch leaves all SMs the same room.
    """

    def __init__(
        self,
        batch_size: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        splits: int | None = None,
        pdl: bool = False,
        *,
        stages: int | None = None,
        ahead: bool | None = None,
    ) -> None:
        if query_heads % kv_heads or query_heads // kv_heads > 16:
            raise ValueError(f"{query_heads} query heads do not share {kv_heads} kv heads in groups of <= 16")
        self.batch_size = batch_size
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.splits = choose_splits(batch_size, kv_heads) if splits is None else splits
        self.stages = (7 if self.splits == 1 else 5) if stages is None else stages
        self.pdl, self._ahead = pdl, batch_size > _CROWDED_BATCH if ahead is None else ahead
        self._parts = SplitParts(batch_size * query_heads, head_dim, self.splits, device, pdl)

    def full(
        self,
        query: Tensor,
        kv_layer: Tensor,
        sequences: PagedSequences,
        sinks: Tensor,
        sm_scale: float,
        out: Tensor,
    ) -> Tensor:
        """All keys. Shapes as in ``reference.paged_attention`` with T = B; writes and returns ``out``.

        Raises:
            ValueError: another shape, or no sinks.
        """
        self._check(query, kv_layer, sequences, sinks)
        _decode_full[(self.batch_size, self.kv_heads, self.splits)](
            query,
            kv_layer,
            sequences.block_table,
            sequences.kv_len,
            sinks,
            out,
            self._parts.acc,
            self._parts.max,
            self._parts.sum,
            kv_layer.stride(0),
            sequences.block_table.stride(0),
            sm_scale * LOG2E,
            HEADS=self.query_heads,
            GROUP=self.query_heads // self.kv_heads,
            PAGE=kv_layer.shape[3],
            DIM=self.head_dim,
            SPLITS=self.splits,
            STAGES=self.stages,
            PDL=self.pdl,
            PREFETCHED=_PREFETCHED_PAGES if self._ahead else 0,
            num_warps=1,
            **launch_options(self.pdl and self._ahead),
        )
        if self.splits > 1:
            self._parts.merge(out)
        return out

    def sliding(
        self,
        query: Tensor,
        kv_layer: Tensor,
        sequences: PagedSequences,
        sinks: Tensor,
        window: int,
        sm_scale: float,
        out: Tensor,
    ) -> Tensor:
        """The last ``window`` keys. Shapes as in ``reference.paged_attention``; fills and returns ``out``.

        Raises:
            ValueError: another shape, no sinks, or a window that is not a power of two.
        """
        self._check(query, kv_layer, sequences, sinks)
        if window & (window - 1):
            raise ValueError(f"window {window} is not a power of two")
        _decode_sliding[(self.batch_size, self.kv_heads)](
            query,
            kv_layer,
            sequences.block_table,
            sequences.kv_len,
            sinks,
            out,
            kv_layer.stride(0),
            sequences.block_table.stride(0),
            sm_scale * LOG2E,
            WINDOW=window,
            HEADS=self.query_heads,
            GROUP=self.query_heads // self.kv_heads,
            PAGE=kv_layer.shape[3],
            DIM=self.head_dim,
            PDL=self.pdl,
            num_warps=4,
            **launch_options(self.pdl),
        )
        return out

    def _check(self, query: Tensor, kv_layer: Tensor, sequences: PagedSequences, sinks: Tensor) -> None:
        expected = (self.batch_size, self.query_heads, self.head_dim)
        if tuple(query.shape) != expected or not query.is_contiguous():
            raise ValueError(f"query is {tuple(query.shape)}, expected contiguous {expected}")
        pages = kv_layer.shape[1:]
        if (
            pages[0] != self.kv_heads
            or pages[1] != 2
            or pages[3] != self.head_dim
            or not kv_layer[0].is_contiguous()
        ):
            raise ValueError(
                f"kv_layer is {tuple(kv_layer.shape)}, expected [N, {self.kv_heads}, 2, S, {self.head_dim}]"
            )
        if tuple(sinks.shape) != (self.query_heads,):
            raise ValueError(f"sinks are {tuple(sinks.shape)}, expected one a query head: {self.query_heads}")
        if sequences.kv_len.shape[0] != self.batch_size:
            raise ValueError(f"{sequences.kv_len.shape[0]} sequences, expected {self.batch_size}")


def choose_splits(batch_size: int, kv_heads: int) -> int:
    """Splits of a full layer's keys: enough programs to fill 132 SMs, none once the batch does it alone."""
    programs = batch_size * kv_heads
    if programs >= 256:
        return 1
    return max(1, min(32, 320 // programs))
