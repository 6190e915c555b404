"""Rotation and page writes of a chunk, thread by thread on the host, against the plain ops."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import pytest
import torch

from antiphon.kernels import reference
from antiphon.kernels.dense.rope import rotation_table

S, D, TOKENS = 16, 64, 7


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["attention/csrc/rope.cu"])


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_rotates_and_writes(library: Any, kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    heads = 8 * kv_heads
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * D).bfloat16()
    positions = torch.tensor([0, 1, 40, 41, 4095, 5000, 7])
    slots = torch.tensor([0, S + 3, 2 * S + 15, -1, 17, 33, 3 * S])
    inv_freq, concentration = reference.yarn_inv_freq(D, 150_000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq, concentration, 5001)
    cache = torch.full((4, 3, kv_heads, 2, S, D), 99.0).bfloat16()
    layer, before = cache[:, 1], cache.clone()
    query = torch.full((TOKENS, heads, D), float("nan")).bfloat16()
    library.call(
        "chunk_rope",
        *(qkv, positions, slots, table, query, layer, c_int64(layer.stride(0)), TOKENS, kv_heads, S, 0, 1),
    )
    parts = qkv.float().view(TOKENS, heads + 2 * kv_heads, D)
    cos, sin = table[positions, :, 0][:, None], table[positions, :, 1][:, None]
    first, second = parts[..., : D // 2], parts[..., D // 2 :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).bfloat16()
    torch.testing.assert_close(
        query, turned[:, :heads], rtol=1e-2, atol=1e-3
    )  # a fused product may round otherwise
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, S)
        keys, values = turned[token, heads : heads + kv_heads], qkv.view(TOKENS, -1, D)[token, -kv_heads:]
        torch.testing.assert_close(layer[page, :, 0, offset], keys, rtol=1e-2, atol=1e-3)
        assert torch.equal(layer[page, :, 1, offset], values)
        before[page, 1, :, :, offset] = layer[page, :, :, offset]
    assert torch.equal(cache, before)  # nothing else was touched
