"""Rotation of queries and keys, and the write of keys and values to their pages, in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.fp8_pages import Fp8Pages, KvLayer, pages_of


def rotation_table(inv_freq: Tensor, concentration: float, positions: int) -> Tensor:
    """[positions, D / 2, 2] float32: cos and sin of every position, times the YaRN concentration."""
    angle = torch.arange(positions, dtype=torch.float64, device=inv_freq.device)[:, None] * inv_freq.double()
    return (torch.stack((angle.cos(), angle.sin()), dim=-1) * concentration).float().contiguous()


@triton.jit
def _e4m3_code(scaled):
    """The e4m3 bits of float32 numbers, to nearest, ties to even; beyond 448 the largest, NaN stays NaN.

    In integers, so that whatever runs this need not know the type. Below 2^-6 a code is a multiple of 2^-9.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(scaled) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0x3FFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 126))
    code = tl.where(magnitude > 0x7F800000, 127, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _to_bfloat16(number):
    """A positive float32 number rounded to bfloat16, ties to even, which the interpreter cuts off instead."""
    bits = tl.minimum(number.to(tl.int32, bitcast=True), 0x7FC00000)  # no NaN beyond that one
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _rope_and_write(
    qkv_ptr,
    position_ptr,
    slot_ptr,
    table_ptr,
    query_ptr,
    kv_ptr,
    page_stride,
    Q: tl.constexpr,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, half)
    position = tl.load(position_ptr + t)
    slot = tl.load(slot_ptr + t)
    cos = tl.load(table_ptr + position * DIM + 2 * d)[None, :]
    sin = tl.load(table_ptr + position * DIM + 2 * d + 1)[None, :]
    inside = head < Q + 2 * G
    at = t * (Q + 2 * G) * DIM + head[:, None] * DIM + d[None, :]
    first = tl.load(qkv_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + half, mask=inside[:, None], other=0.0).to(tl.float32)
    rotate = (head < Q + G)[:, None]
    out_first = tl.where(rotate, first * cos - second * sin, first).to(query_ptr.dtype.element_ty)
    out_second = tl.where(rotate, second * cos + first * sin, second).to(query_ptr.dtype.element_ty)
    query_at = t * Q * DIM + head[:, None] * DIM + d[None, :]
    is_query = (head < Q)[:, None]
    tl.store(query_ptr + query_at, out_first, mask=is_query)
    tl.store(query_ptr + query_at + half, out_second, mask=is_query)
    kv = head - Q
    is_value = kv >= G
    kv_head = tl.where(is_value, kv - G, kv)
    stored = (head >= Q) & inside & (slot + tl.zeros_like(head) >= 0)
    page = kv_ptr + (slot // PAGE) * page_stride
    if FP8:
        one, other = out_first.to(tl.float32), out_second.to(tl.float32)
        # As in fp8_pages.quantise, to the bit. The bits of magnitudes grow with them, NaN beyond all.
        low, high = one.to(tl.int32, bitcast=True), other.to(tl.int32, bitcast=True)
        peak = tl.maximum(tl.max(low & 0x7FFFFFFF, 1), tl.max(high & 0x7FFFFFFF, 1))
        scale = peak.to(tl.float32, bitcast=True) * 0.002232142857142857
        scale = _to_bfloat16(tl.where(scale < 7.888609052210118e-31, 7.888609052210118e-31, scale))
        inverse = tl.div_rn(1.0, scale)[:, None]
        kv_row = is_value.to(tl.int32) * PAGE + slot % PAGE
        kv_at = (kv_head * (2 * PAGE * (DIM + 2)) + kv_row * DIM)[:, None] + d[None, :]
        tl.store(page + kv_at, _e4m3_code(one * inverse), mask=stored[:, None])
        tl.store(page + kv_at + half, _e4m3_code(other * inverse), mask=stored[:, None])
        scale_at = kv_head * (PAGE * (DIM + 2)) + PAGE * DIM + kv_row
        tl.store(page.to(tl.pointer_type(tl.bfloat16)) + scale_at, scale.to(tl.bfloat16), mask=stored)
    else:
        kv_row = (kv_head * 2 + is_value.to(tl.int32)) * PAGE + slot % PAGE
        kv_at = kv_row[:, None] * DIM + d[None, :]
        tl.store(page + kv_at, out_first.to(kv_ptr.dtype.element_ty), mask=stored[:, None])
        tl.store(page + kv_at + half, out_second.to(kv_ptr.dtype.element_ty), mask=stored[:, None])


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slot: Tensor,
    rotation: Tensor,
    kv_layer: KvLayer,
    query_heads: int,
    query: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v to their pages, return the rotated queries.

    Args:
        qkv: [T, (Q + 2 G) * D] contiguous, bias added.
        positions, slot: [T] int64; a negative slot is not stored.
        rotation: [positions, D / 2, 2] float32 from ``rotation_table``.
        kv_layer: [N, G, 2, S, D] view, or FP8 pages.
        query: [T, Q, D] output; keys and values take its dtype before they are stored.
    """
    kv_heads, page_size, dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
    pages, page_stride = pages_of(kv_layer)
    _rope_and_write[(qkv.shape[0],)](
        qkv,
        positions,
        slot,
        rotation,
        query,
        pages,
        page_stride,
        Q=query_heads,
        G=kv_heads,
        PAGE=page_size,
        DIM=dim,
        HEAD_BLOCK=triton.next_power_of_2(query_heads + 2 * kv_heads),
        FP8=isinstance(kv_layer, Fp8Pages),
        num_warps=4,
    )
    return query
