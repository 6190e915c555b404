"""Grouping by expert, and the Triton MoE on MXFP4 weights against the plain op (interpreter, float32)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.expert_tiles import group_by_expert
from antiphon.kernels.portable_moe import moe

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real one"
)


@pytest.mark.parametrize(("tokens", "experts", "block"), [(1, 8, 16), (5, 8, 16), (40, 4, 16), (33, 128, 64)])
def test_tiles_cover_every_pair_once_with_one_expert_each(tokens: int, experts: int, block: int) -> None:
    ids = torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)])
    tiles = group_by_expert(ids, experts, block)
    seen = []
    for expert, start in zip(tiles.expert.tolist(), tiles.start.tolist(), strict=True):
        if expert < 0:
            continue
        end = min(start + block, int(tiles.row_end[expert]))
        pairs = tiles.pair[start:end].tolist()
        assert pairs
        assert pairs == sorted(pairs)
        assert all(ids.reshape(-1)[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * 4))


def expert_set(
    experts: int, hidden: int, inner: int
) -> tuple[reference.ExpertMatrix, Tensor, reference.ExpertMatrix, Tensor]:
    gate_up = reference.quantize_mxfp4(torch.randn(experts, 2 * inner, hidden) / hidden**0.5)
    down = reference.quantize_mxfp4(torch.randn(experts, hidden, inner) / inner**0.5)
    return gate_up, torch.randn(experts, 2 * inner), down, torch.randn(experts, hidden)


@interpreted
@pytest.mark.parametrize("spread", ["random", "one expert"])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_moe_equals_the_plain_op(tokens: int, spread: str) -> None:
    torch.manual_seed(tokens)
    experts, hidden, inner = 6, 128, 64
    gate_up, gate_up_bias, down, down_bias = expert_set(experts, hidden, inner)
    x, residual = torch.randn(tokens, hidden) * 3, torch.randn(tokens, hidden)
    if spread == "random":
        ids = torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)])
    else:
        ids = torch.tensor([[5, 0, 1, 2]]).expand(tokens, 4).contiguous()
    weights = torch.softmax(torch.randn(tokens, 4), -1)
    out = moe(x, ids, weights, gate_up, gate_up_bias, down, down_bias, residual)
    expected = residual + reference.moe(
        x,
        ids,
        weights,
        reference.dequantize_mxfp4(gate_up),
        gate_up_bias,
        reference.dequantize_mxfp4(down),
        down_bias,
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(-alpha * gate) -> inf, sigmoid -> 0
def test_values_beyond_the_clamps_are_clamped() -> None:
    gate_up, gate_up_bias, down, down_bias = expert_set(4, 64, 64)
    x = torch.randn(2, 64) * 100
    ids, weights = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]), torch.full((2, 4), 0.25)
    out = moe(x, ids, weights, gate_up, gate_up_bias, down, down_bias, torch.zeros(2, 64))
    wide = (reference.dequantize_mxfp4(gate_up), gate_up_bias, reference.dequantize_mxfp4(down), down_bias)
    torch.testing.assert_close(out, reference.moe(x, ids, weights, *wide), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(out, reference.moe(x, ids, weights, *wide, 1e9), rtol=1e-2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    gate_up, gate_up_bias, down, down_bias = expert_set(4, 96, 64)
    with pytest.raises(ValueError, match="hidden size 96"):
        moe(
            torch.randn(1, 96),
            torch.zeros(1, 4, dtype=torch.int64),
            torch.ones(1, 4),
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            torch.zeros(1, 96),
        )
