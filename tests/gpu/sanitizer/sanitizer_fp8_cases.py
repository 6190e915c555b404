"""The kernels of FP8 pages, added to the other cases."""

from __future__ import annotations

import torch
from sanitizer_cases import CASES, HEAD_DIM, PAGE, Machine, case, sequences_of

from antiphon.kernels.attention import fp8_hopper
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.dense import rope
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes

__all__ = ["CASES", "Machine"]

_F32 = torch.float32


def _pages(machine: Machine, count: int, kv_heads: int) -> Fp8Pages:
    """A layer of two, every byte of which is a finite number or half a finite scale."""
    size = head_bytes(PAGE, HEAD_DIM)
    return Fp8Pages(machine.integers(127, count, 2, kv_heads, size)[:, 1], PAGE, HEAD_DIM)


@case("decode_attention_fp8")
def _decode(machine: Machine) -> None:
    lengths = [1, 64, 65, 200]
    sequences, count = sequences_of(machine, lengths, [1] * 4)
    pages = _pages(machine, count, 2)
    query, sinks = machine.random(4, 16, HEAD_DIM, dtype=machine.triton_dtype), machine.random(16, dtype=_F32)
    for splits in (1, 3):
        kernel = Fp8DecodeAttention(4, 16, 2, HEAD_DIM, machine.device, splits=splits)
        kernel.full(query, pages, sequences, sinks, 0.125, torch.empty_like(query))


@case("decode_attention_fp8_hopper")
def _decode_hopper(machine: Machine) -> None:
    lengths = [1, 64, 65, 200]
    sequences, count = sequences_of(machine, lengths, [1] * 4)
    pages = _pages(machine, count, 2)
    query, sinks = machine.random(4, 16, HEAD_DIM), machine.random(16, dtype=_F32)
    for splits, pdl in ((1, True), (3, False)):
        kernel = fp8_hopper.HopperFp8DecodeAttention(
            4, 2, machine.device, splits=splits, pdl=pdl and machine.pdl
        )
        kernel.full(query, pages, sequences, sinks, 0.125, torch.empty_like(query))


@case("widen_pages")
def _widen(machine: Machine) -> None:
    sequences, count = sequences_of(machine, [1, 200], [1, 1])
    WidePages().widen(_pages(machine, count, 2), sequences, machine.triton_dtype)


@case("fp8_store")
def _store(machine: Machine) -> None:
    sequences, count = sequences_of(machine, [70], [11])
    few = fp8_hopper.FewTokens(8, machine.device)
    for pdl in (True, False):
        few.store(_pages(machine, count, 8), sequences.slot, pdl=pdl)


@case("rope_to_fp8_pages")
def _rope(machine: Machine) -> None:
    sequences, count = sequences_of(machine, [70], [5])
    positions, rotation = (
        machine.integers(70, 5, dtype=torch.int64),
        machine.random(70, HEAD_DIM // 2, 2, dtype=_F32),
    )
    for kv_heads in (8, 1):
        shape = 5, 10 * kv_heads * HEAD_DIM
        query = machine.random(5, 8 * kv_heads, HEAD_DIM)
        pages = _pages(machine, count, kv_heads)
        chunk_rope_and_write(machine.random(*shape), positions, sequences.slot, rotation, pages, query)
        dtype = machine.triton_dtype
        rope.rope_and_write(
            *(machine.random(*shape, dtype=dtype), positions, sequences.slot, rotation, pages, 8 * kv_heads),
            query.to(dtype),
        )
