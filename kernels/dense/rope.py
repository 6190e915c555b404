"""Rotation of queries and keys, and the write of keys and values to their pages, in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotation_table(inv_freq: Tensor, concentration: float, positions: int) -> Tensor:
    """[positions, D / 2, 2] float32: cos and sin of every position, times the YaRN concentration."""
    angle = torch.arange(positions, dtype=torch.float64, device=inv_freq.device)[:, None] * inv_freq.double()
    return (torch.stack((angle.cos(), angle.sin()), dim=-1) * concentration).float().contiguous()


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
    kv_row = (kv_head * 2 + is_value.to(tl.int32)) * PAGE + slot % PAGE
    kv_at = (slot // PAGE) * page_stride + kv_row[:, None] * DIM + d[None, :]
    stored = ((head >= Q) & inside & (slot + tl.zeros_like(head) >= 0))[:, None]
    tl.store(kv_ptr + kv_at, out_first.to(kv_ptr.dtype.element_ty), mask=stored)
    tl.store(kv_ptr + kv_at + half, out_second.to(kv_ptr.dtype.element_ty), mask=stored)


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slot: Tensor,
    rotation: Tensor,
    kv_layer: Tensor,
    query_heads: int,
    query: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v to their pages, return the rotated queries.

    Args:
        qkv: [T, (Q + 2 G) * D] contiguous, bias added.
        positions, slot: [T] int64; a negative slot is not stored.
        rotation: [positions, D / 2, 2] float32 from ``rotation_table``.
        kv_layer: [N, G, 2, S, D] view.
        query: [T, Q, D] output.
    """
    kv_heads, page_size, dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
    _rope_and_write[(qkv.shape[0],)](
        qkv,
        positions,
        slot,
        rotation,
        query,
        kv_layer,
        kv_layer.stride(0),
        Q=query_heads,
        G=kv_heads,
        PAGE=page_size,
        DIM=dim,
        HEAD_BLOCK=triton.next_power_of_2(query_heads + 2 * kv_heads),
        num_warps=4,
    )
    return query
