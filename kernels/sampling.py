"""The choice of a token per row for the two common ways of sampling, in Triton: greedy, and by inverse
transform over the whole vocabulary in the order of ids.

The logits are read once for the best token, and once more for the sums of weights where one is drawn. Sums
are in float64. Whatever the logits are, what is chosen is a valid id. ``rank_sampling`` does the same where
several ranks hold the logits, with the pieces that lie here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _TILE = 2048, 8192
_LEAST_PART = 1024
"""Ids of a part, about, below which more parts would shorten nothing."""


@triton.jit
def _packed_best(logits, ids):
    """Order of float32 (a NaN is highest) and, among equals, of lower ids, in one int64."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(logits != logits, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def best_value(packed):
    """The logit of a packed best; some NaN for a NaN."""
    key = (packed >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def best_id(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def not_finite(best):
    """1 where the best logit is not finite, else 0."""
    return tl.where((best == best) & (tl.abs(best) < float("inf")), 0.0, 1.0).to(tl.float64)


@triton.jit
def row_best(part_ptr, row, PARTS: tl.constexpr, RANKS: tl.constexpr):
    """The packed best of one row, of parts [RANKS, rows, PARTS]; the grid's first axis is the rows."""
    best = tl.full([PARTS], -0x8000000000000000, tl.int64)
    for rank in tl.static_range(RANKS):
        row_of_rank = rank * tl.num_programs(0).to(tl.int64) + row
        best = tl.maximum(best, tl.load(part_ptr + row_of_rank * PARTS + tl.arange(0, PARTS)))
    return tl.max(best, 0)


@triton.jit(do_not_specialize=["first_id"])
def _scan(
    logits_ptr,
    part_ptr,
    first_id,
    V,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best of one part of one row, whose V logits are those of the ids from ``first_id`` on."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full([CHUNK], -0x8000000000000000, tl.int64)
    for begin in range(0, EACH, CHUNK):
        ids = part * EACH + begin + tl.arange(0, CHUNK)
        inside = (begin + tl.arange(0, CHUNK) < EACH) & (ids < V)
        logits = tl.load(logits_ptr + row * V + ids, mask=inside, other=0.0)
        best = tl.maximum(best, tl.where(inside, _packed_best(logits, first_id + ids), -0x8000000000000000))
    tl.store(part_ptr + row * PARTS + part, tl.max(best, 0))


@triton.jit
def weight_scale(inverse_temperature_ptr, row):
    """Bounded so that any difference of two logits times it is finite."""
    return tl.minimum(tl.load(inverse_temperature_ptr + row), 1e30).to(tl.float32)


@triton.jit
def weights_of(logits, best, scale):
    return tl.exp((logits - best) * scale)


@triton.jit(do_not_specialize_on_alignment=["inverse_temperature_ptr"])
def _sum_blocks(
    logits_ptr,
    part_ptr,
    inverse_temperature_ptr,
    sum_ptr,
    V,
    BLOCKS,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights of TILE blocks of ids, summed block by block; the last block may be short."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = best_value(row_best(part_ptr, row, PARTS, RANKS))
    scale = weight_scale(inverse_temperature_ptr, row)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < BLOCKS)[:, None] & (ids < V)
    logits = tl.load(logits_ptr + row * V + ids, mask=inside, other=float("-inf"))
    weights = tl.where(inside, weights_of(logits, best, scale), 0.0)
    sums = tl.sum(weights.to(tl.float64), 1)
    tl.store(sum_ptr + row * BLOCKS + block, sums, mask=block < BLOCKS)


@triton.jit
def _just_below(total):
    """The next lower float64 of a positive one."""
    return (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)


@triton.jit
def _highest(cumulative, weights):
    """The cumulative weight of all; sums rounded in another order may pass it where nothing is added."""
    return tl.max(tl.where(weights > 0, cumulative, 0.0), 0)


@triton.jit
def _first_beyond(cumulative, weights, target, index, count):
    """The first of ``count`` indices with a weight whose cumulative weight exceeds the target, else the last.

    There is one if the target is below ``_highest``, so weights of zero are taken only where no weight is a
    number above zero.
    """
    beyond = (cumulative > target) & (weights > 0) & (index < count)
    return tl.min(tl.where(beyond, index, count - 1), 0)


@triton.jit
def draw_block(sums, uniform, index, count):
    """Of the sums of ``count`` blocks, and 0 behind: the drawn block, and how far into it the draw lies."""
    ends = tl.cumsum(sums, 0)
    total = _highest(ends, sums)
    target = tl.minimum(uniform * total, _just_below(total))
    block = _first_beyond(ends, sums, target, index, count)
    return block, target - tl.sum(tl.where(index == block - 1, ends, 0.0), 0)


@triton.jit
def draw_within(weights, rest, index, count):
    """Of the weights of ``count`` ids of a block, and 0 behind: the id at this distance into it."""
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    rest = tl.minimum(rest, _just_below(_highest(cumulative, weights)))
    return _first_beyond(cumulative, weights, rest, index, count)


@triton.jit(do_not_specialize_on_alignment=["inverse_temperature_ptr", "uniform_ptr", "sampled_ptr"])
def _finish(
    logits_ptr,
    part_ptr,
    inverse_temperature_ptr,
    uniform_ptr,
    sum_ptr,
    sampled_ptr,
    out_ptr,
    V,
    BLOCKS,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    DRAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of one row: its best, or the draw among blocks of ids and then within one."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    packed = row_best(part_ptr, row, PARTS, 1)
    best = best_value(packed)
    token = best_id(packed)
    if DRAW:
        index = tl.arange(0, MOST_BLOCKS)
        sums = tl.load(sum_ptr + row * BLOCKS + index, mask=index < BLOCKS, other=0.0)
        block, rest = draw_block(sums, tl.load(uniform_ptr + row), index, BLOCKS)
        within = tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * V + block * BLOCK + within)
        weights = weights_of(logits, best, weight_scale(inverse_temperature_ptr, row))
        token = (block * BLOCK + draw_within(weights, rest, within, BLOCK)).to(tl.int64)
    tl.store(sampled_ptr + row, token)
    tl.store(out_ptr + row * 2, token.to(tl.float64))
    tl.store(out_ptr + row * 2 + 1, not_finite(best))


def _launch_options(pdl: bool) -> dict[str, Any]:
    return {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}


def best_of_parts(logits: Tensor, first_id: int = 0, pdl: bool = False) -> Tensor:
    """The first launch of a choice.

    Args:
        logits: [M, V] float32 contiguous.
        first_id: token id of the first column.
        pdl: programmatic dependent launch.

    Returns:
        [M, parts] int64: of each part of a row the best logit and, of equal ones, the lowest id, packed so
        that the largest is the best of the row.
    """
    rows, width = logits.shape
    parts = max(16, min(64, triton.next_power_of_2(512 // rows + 1) // 2))
    parts = min(parts, triton.next_power_of_2(triton.cdiv(width, _LEAST_PART)))
    each = triton.cdiv(triton.cdiv(width, parts), 16) * 16
    part = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _scan[(rows, parts)](
        *(logits, part, first_id, width),
        PARTS=parts,
        EACH=each,
        CHUNK=_CHUNK,
        num_warps=8,
        **_launch_options(pdl),
    )
    return part


def sums_of_blocks(
    logits: Tensor, parts: Tensor, inverse_temperatures: Tensor, block: int, tile: int, pdl: bool = False
) -> Tensor:
    """The second launch of a draw.

    Args:
        logits: [M, V] float32 contiguous.
        parts: [ranks, M, parts] int64, of ``best_of_parts`` of every rank that holds logits of these rows.
        inverse_temperatures: [M] float64.
        block: ids whose weights are summed, a power of two; the last block may have fewer.
        tile: blocks of a program, a power of two.
        pdl: programmatic dependent launch.

    Returns:
        [M, blocks] float64: the sum of each block's weights, of which the row's best has 1.
    """
    rows, width = logits.shape
    blocks = triton.cdiv(width, block)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    _sum_blocks[(rows, triton.cdiv(blocks, tile))](
        *(logits, parts, inverse_temperatures, sums, width, blocks),
        PARTS=parts.shape[2],
        RANKS=parts.shape[0],
        BLOCK=block,
        TILE=tile,
        num_warps=4,
        **_launch_options(pdl),
    )
    return sums


def choose_tokens(
    logits: Tensor,
    sampled: Tensor,
    inverse_temperatures: Tensor | None = None,
    uniforms: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """One token per row; greedy when no temperatures are given.

    Args:
        logits: [M, V] float32 contiguous.
        sampled: [M] int64, overwritten with the tokens.
        inverse_temperatures, uniforms: [M] float64 of each row's draw.
        pdl: programmatic dependent launch.

    Returns:
        [M, 2] float64: the token, and 0 or, where the best logit is not finite, 1. Of equal logits the lowest
        id is the best; a NaN counts as highest. A token of weight zero is never drawn.
    """
    rows, vocabulary = logits.shape
    part = best_of_parts(logits, pdl=pdl)
    block = math.gcd(vocabulary, 1024)
    blocks = vocabulary // block
    sums = None
    if inverse_temperatures is not None:
        # Small tiles spread a few rows over all SMs.
        tile = triton.next_power_of_2(max(1, min(_TILE // block, max(4, blocks * rows // 2048))))
        sums = sums_of_blocks(logits, part[None], inverse_temperatures, block, tile, pdl)
    out = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    _finish[(rows,)](
        *(logits, part, inverse_temperatures, uniforms, sums, sampled, out, vocabulary, blocks),
        PARTS=part.shape[1],
        BLOCK=block,
        MOST_BLOCKS=triton.next_power_of_2(blocks),
        DRAW=sums is not None,
        num_warps=8,
        **_launch_options(pdl),
    )
    return out
