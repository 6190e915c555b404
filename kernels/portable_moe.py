"""The mixture of experts on MXFP4 weights in Triton, for any shape whose K is a multiple of 64.

The 4-bit weights are read as they are and widened in registers. This is the road for shapes that the
kernels made for hidden size 2880 do not take, and the form that runs in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.expert_tiles import ExpertTiles, group_by_expert
from antiphon.kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertMatrix

BLOCK_K = 64


@triton.jit
def _widen(block_ptr, scale_ptr, rows, row_mask, k, COLS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 64] float32 weights at columns k .. k + 64 of an MXFP4 matrix."""
    byte = tl.arange(0, 32)
    packed = tl.load(
        block_ptr + rows[:, None] * (COLS // 2) + k // 2 + byte[None, :], mask=row_mask[:, None], other=0
    ).to(tl.int32)
    code = tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCK_N, 64])
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    value = tl.where(code >= 8, -magnitude, magnitude)
    half = tl.arange(0, 2)
    scale = tl.load(
        scale_ptr + rows[:, None] * (COLS // 32) + k // 32 + half[None, :], mask=row_mask[:, None], other=0
    ).to(tl.int32)
    factor = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)
    spread = tl.reshape(tl.broadcast_to(factor[:, :, None], [BLOCK_N, 2, 32]), [BLOCK_N, 64])
    return value * spread


@triton.jit
def _gate_up(
    x_ptr,
    block_ptr,
    scale_ptr,
    bias_ptr,
    hidden_ptr,
    pair_ptr,
    row_end_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    alpha,
    limit,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expert = tl.load(tile_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_start_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    live = row < tl.load(row_end_ptr + expert)
    token = (tl.load(pair_ptr + row, mask=live, other=0) // K).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < ROWS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, COLS, 64):
        column = k + tl.arange(0, 64)
        x = tl.load(x_ptr + token[:, None] * COLS + column[None, :], mask=live[:, None], other=0.0)
        weight = _widen(
            block_ptr + expert * ROWS * (COLS // 2),
            scale_ptr + expert * ROWS * (COLS // 32),
            n,
            inside,
            k,
            COLS,
            BLOCK_N,
        ).to(x.dtype)
        acc = tl.dot(x, tl.trans(weight), acc)
    acc += tl.load(bias_ptr + expert * ROWS + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    half = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(
        hidden_ptr + row[:, None].to(tl.int64) * (ROWS // 2) + half[None, :],
        hidden.to(hidden_ptr.dtype.element_ty),
        mask=live[:, None] & (half < ROWS // 2)[None, :],
    )


@triton.jit
def _down(
    hidden_ptr,
    block_ptr,
    scale_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    pair_ptr,
    row_end_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expert = tl.load(tile_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_start_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    live = row < tl.load(row_end_ptr + expert)
    pair = tl.load(pair_ptr + row, mask=live, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < ROWS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, COLS, 64):
        column = k + tl.arange(0, 64)
        h = tl.load(
            hidden_ptr + row[:, None].to(tl.int64) * COLS + column[None, :], mask=live[:, None], other=0.0
        )
        weight = _widen(
            block_ptr + expert * ROWS * (COLS // 2),
            scale_ptr + expert * ROWS * (COLS // 32),
            n,
            inside,
            k,
            COLS,
            BLOCK_N,
        ).to(h.dtype)
        acc = tl.dot(h, tl.trans(weight), acc)
    acc += tl.load(bias_ptr + expert * ROWS + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    acc *= tl.load(weight_ptr + pair, mask=live, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + pair[:, None] * ROWS + n[None, :], acc, mask=live[:, None] & inside[None, :])


@triton.jit
def _combine(part_ptr, residual_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        total += tl.load(part_ptr + (t * K + k) * H + column, mask=inside, other=0.0)
    total += tl.load(residual_ptr + t * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def moe(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: ExpertMatrix,
    gate_up_bias: Tensor,
    down: ExpertMatrix,
    down_bias: Tensor,
    residual: Tensor,
    limit: float = SWIGLU_LIMIT,
) -> Tensor:
    """``residual + reference.moe(...)`` on MXFP4 weights.

    Args:
        x, residual: [T, H] contiguous; expert_ids, expert_weights: [T, K].
        gate_up: MXFP4 [E, 2 I, H], rows interleaved; gate_up_bias: [E, 2 I].
        down: MXFP4 [E, H, I]; down_bias: [E, H].

    Returns:
        [T, H] in residual's dtype; the sum over k is taken in float32 in the order of k.

    Raises:
        ValueError: H or I is not a multiple of 64.
    """
    tokens, hidden_size = x.shape
    experts, rows = gate_up.blocks.shape[:2]
    inner, choices = rows // 2, expert_ids.shape[1]
    if hidden_size % BLOCK_K or inner % BLOCK_K:
        raise ValueError(f"hidden size {hidden_size} and expert size {inner} must be multiples of {BLOCK_K}")
    pairs = tokens * choices
    tiles = group_by_expert(expert_ids, experts, block=64 if pairs >= 32 * experts else 16)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    _gate_up[(tiles.expert.shape[0], triton.cdiv(rows, 64))](
        *(
            x,
            gate_up.blocks,
            gate_up.scales,
            gate_up_bias,
            hidden,
            *_tile_arguments(tiles),
            SWIGLU_ALPHA,
            limit,
        ),
        K=choices,
        ROWS=rows,
        COLS=hidden_size,
        BLOCK_M=tiles.block,
        BLOCK_N=64,
    )
    parts = torch.empty(pairs, hidden_size, dtype=torch.float32, device=x.device)
    _down[(tiles.expert.shape[0], triton.cdiv(hidden_size, 64))](
        *(hidden, down.blocks, down.scales, down_bias, expert_weights, parts, *_tile_arguments(tiles)),
        ROWS=hidden_size,
        COLS=inner,
        BLOCK_M=tiles.block,
        BLOCK_N=64,
    )
    out = torch.empty_like(residual)
    _combine[(tokens,)](
        parts, residual, out, H=hidden_size, K=choices, BLOCK=triton.next_power_of_2(hidden_size)
    )
    return out


def _tile_arguments(tiles: ExpertTiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tiles.pair, tiles.row_end, tiles.expert, tiles.start
