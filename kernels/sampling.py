"""The choice of a token per row for the two common ways of sampling, in Triton: greedy, and by inverse
transform over the whole vocabulary in the order of ids.

The logits are read once for the best token, and once more for the sums of weights where one is drawn. Sums
are in float64. Whatever the logits are, what is chosen is a valid id.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _TILE = 2048, 8192


@triton.jit
def _packed_best(logits, ids):
    """Order of float32 (a NaN is highest) and, among equals, of lower ids, in one int64."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(logits != logits, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _best_value(packed):
    """The logit of a packed best; some NaN for a NaN."""
    key = (packed >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scan(
    logits_ptr, part_ptr, V, PARTS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Best of one part of one row."""
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
        best = tl.maximum(best, tl.where(inside, _packed_best(logits, ids), -0x8000000000000000))
    tl.store(part_ptr + row * PARTS + part, tl.max(best, 0))


@triton.jit
def _weights(logits, best, scale):
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
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights of TILE blocks of ids, summed block by block."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = _best_value(tl.max(tl.load(part_ptr + row * PARTS + tl.arange(0, PARTS)), 0))
    scale = tl.minimum(tl.load(inverse_temperature_ptr + row), 1e30).to(tl.float32)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < BLOCKS)[:, None] & (ids < V)
    logits = tl.load(logits_ptr + row * V + ids, mask=inside, other=float("-inf"))
    sums = tl.sum(_weights(logits, best, scale).to(tl.float64), 1)
    tl.store(sum_ptr + row * BLOCKS + block, sums, mask=block < BLOCKS)


@triton.jit
def _first_beyond(cumulative, target, index, count):
    """The first index below ``count`` whose cumulative weight exceeds the target, else the last."""
    return tl.min(tl.where((cumulative > target) & (index < count), index, count - 1), 0)


@triton.jit
def _just_below(total):
    """The next lower float64 of a positive one."""
    return (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)


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
    packed = tl.max(tl.load(part_ptr + row * PARTS + tl.arange(0, PARTS)), 0)
    best = _best_value(packed)
    token = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    if DRAW:
        scale = tl.minimum(tl.load(inverse_temperature_ptr + row), 1e30).to(tl.float32)
        index = tl.arange(0, MOST_BLOCKS)
        sums = tl.load(sum_ptr + row * BLOCKS + index, mask=index < BLOCKS, other=0.0)
        ends = tl.cumsum(sums, 0)
        total = tl.max(ends, 0)
        target = tl.minimum(tl.load(uniform_ptr + row) * total, _just_below(total))
        block = _first_beyond(ends, target, index, BLOCKS)
        before = tl.sum(tl.where(index == block - 1, ends, 0.0), 0)
        within = tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * V + block * BLOCK + within)
        inner = tl.cumsum(_weights(logits, best, scale).to(tl.float64), 0)
        rest = tl.minimum(target - before, _just_below(tl.max(inner, 0)))
        token = (block * BLOCK + _first_beyond(inner, rest, within, BLOCK)).to(tl.int64)
    finite = (best == best) & (tl.abs(best) < float("inf"))
    tl.store(sampled_ptr + row, token)
    tl.store(out_ptr + row * 2, token.to(tl.float64))
    tl.store(out_ptr + row * 2 + 1, tl.where(finite, 0.0, 1.0).to(tl.float64))


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
    parts = max(16, min(64, triton.next_power_of_2(512 // rows + 1) // 2))
    block = math.gcd(vocabulary, 1024)
    blocks = vocabulary // block
    launch: dict[str, Any] = {"PARTS": parts, "PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    part = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    draws = inverse_temperatures is not None
    sums = torch.empty(rows, blocks if draws else 0, dtype=torch.float64, device=logits.device)
    each = triton.cdiv(triton.cdiv(vocabulary, parts), 16) * 16
    _scan[(rows, parts)](logits, part, vocabulary, EACH=each, CHUNK=_CHUNK, num_warps=8, **launch)
    launch["BLOCK"] = block
    if draws:
        # Small tiles spread a few rows over all SMs.
        tile = triton.next_power_of_2(max(1, min(_TILE // block, max(4, blocks * rows // 2048))))
        _sum_blocks[(rows, triton.cdiv(blocks, tile))](
            *(logits, part, inverse_temperatures, sums, vocabulary, blocks), TILE=tile, num_warps=4, **launch
        )
    _finish[(rows,)](
        *(logits, part, inverse_temperatures, uniforms, sums, sampled, out, vocabulary, blocks),
        MOST_BLOCKS=triton.next_power_of_2(blocks),
        DRAW=draws,
        num_warps=8,
        **launch,
    )
    return out
