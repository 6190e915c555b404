"""The decode projections, thread by thread on the host, against the plain ops."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.dense.rope import rotation_table

BLOCKS = 3


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["dense/skinny.cu"])


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("tokens", [1, 3, 13])
def test_qkv_rotation_and_page_write(library: Any, tokens: int) -> None:
    torch.manual_seed(tokens)
    query_heads, kv_heads, page = 3, 1, 16
    rows = (query_heads + 2 * kv_heads) * 64
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq, concentration, 200)
    x, weight, bias = bf16(tokens, 2880), bf16(rows, 2880, scale=1 / 54), bf16(rows)
    positions = torch.randint(0, 200, (tokens,))
    slot = torch.randperm(3 * page)[:tokens].contiguous()
    slot[tokens // 2] = -1
    cache = torch.full((3, 2, kv_heads, 2, page, 64), 9.0).bfloat16()
    plain = cache.float()
    layer = cache[:, 1]
    query = torch.full((tokens, query_heads, 64), float("nan")).bfloat16()
    library.call(
        "qkv_rope",
        *(x, weight, bias, tokens, positions, slot, table, query, layer, c_int64(layer.stride(0))),
        *(query_heads, kv_heads, page, BLOCKS, 0),
    )
    qkv = reference.linear(x.float(), weight.float(), bias.float()).view(tokens, -1, 64)
    q, k, v = qkv.split([query_heads, kv_heads, kv_heads], 1)
    reference.write_kv(reference.rope(k, positions, inv_freq, concentration), v, plain[:, 1], slot)
    assert error(query, reference.rope(q, positions, inv_freq, concentration)) <= 3e-3
    assert error(cache, plain) <= 3e-3
    assert torch.equal(cache[:, 0].float(), plain[:, 0])


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_output_projection_adds_to_the_residual(library: Any, tokens: int) -> None:
    torch.manual_seed(tokens)
    rows = 104
    x, weight, bias = bf16(tokens, 4096), bf16(rows, 4096, scale=1 / 64), bf16(rows)
    residual = bf16(tokens + 1, rows)
    expected = residual.float()
    expected[:tokens] += reference.linear(x.float(), weight.float(), bias.float())
    library.call(
        "output_projection",
        *(x, weight, bias, residual, tokens, rows, BLOCKS, 0),
    )
    assert error(residual, expected) <= 3e-3
    assert torch.equal(residual[tokens].float(), expected[tokens])


@pytest.mark.parametrize("width", [512, 1024, 2048])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_parts_of_the_output_projection(library: Any, tokens: int, width: int) -> None:
    torch.manual_seed(tokens)
    rows = 104
    x, weight, bias = bf16(tokens, width), bf16(rows, width, scale=width**-0.5), bf16(rows)
    out = torch.full((tokens + 1, rows), 7.0).bfloat16()
    library.call(
        "partial_projection",
        *(x, weight, bias, out, tokens, width, rows, BLOCKS, 0),
    )
    assert error(out[:tokens], reference.linear(x.float(), weight.float(), bias.float())) <= 3e-3
    assert bool((out[tokens] == 7.0).all())


@pytest.mark.parametrize("tokens", [2, 11])
def test_logits(library: Any, tokens: int) -> None:
    torch.manual_seed(tokens)
    rows = 200
    x, weight = bf16(tokens, 2880), bf16(rows, 2880, scale=1 / 54)
    logits = torch.full((tokens, rows), float("nan"))
    library.call("logits", x, weight, logits, tokens, rows, BLOCKS, 0)
    assert error(logits, x.float() @ weight.float().T) <= 1e-5
