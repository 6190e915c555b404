"""Router, SwiGLU, experts and MXFP4 in plain torch against definitions written out one value at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import (
    FP4_VALUES,
    ExpertMatrix,
    add_rms_norm,
    dequantize_mxfp4,
    linear,
    moe,
    quantize_mxfp4,
    rms_norm,
    route,
    swiglu,
)

T, H, INTER, E, K = 7, 8, 6, 5, 3


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_route_takes_the_best_then_normalises_over_them_alone() -> None:
    x, weight, bias = randn(T, H, seed=0), randn(E, H, seed=1), randn(E, seed=2)
    ids, weights = route(x, weight, bias, K)
    for t in range(T):
        logits = (weight @ x[t] + bias).tolist()
        best = sorted(range(E), key=lambda e: -logits[e])[:K]
        total = sum(math.exp(logits[e]) for e in best)
        assert ids[t].tolist() == best
        assert weights[t].tolist() == pytest.approx([math.exp(logits[e]) / total for e in best], rel=1e-5)


def test_route_breaks_ties_by_the_lowest_id() -> None:
    ids, weights = route(torch.zeros(2, H), randn(E, H, seed=1), torch.tensor([0.0, 1, 1, 0, 1]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]] * 2
    assert weights.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (0.0, 5.0, 0.0),
        (1.0, 0.0, 1 / (1 + math.exp(-1.702))),
        (9.0, 1.0, 2 * 7 / (1 + math.exp(-1.702 * 7))),  # the gate's upper clamp
        (-9.0, 1.0, 2 * -9 / (1 + math.exp(1.702 * 9))),  # it has no lower one
        (1.0, 9.0, 8 / (1 + math.exp(-1.702))),
        (1.0, -9.0, -6 / (1 + math.exp(-1.702))),
    ],
)
def test_swiglu_clamps_and_interleaves(gate: float, up: float, expected: float) -> None:
    out = swiglu(torch.tensor([[gate, up, 1.0, 0.0]]))
    assert out.tolist()[0] == pytest.approx([expected, 1 / (1 + math.exp(-1.702))], rel=1e-5)


def test_swiglu_takes_another_limit() -> None:
    out = swiglu(torch.tensor([[9.0, 9.0]]), limit=2.0)
    assert out.item() == pytest.approx(2 / (1 + math.exp(-3.404)) * 3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_is_the_weighted_sum_of_its_experts(dtype: torch.dtype) -> None:
    x = randn(T, H, seed=0).to(dtype)
    gate_up, gate_up_bias = randn(E, 2 * INTER, H, seed=1).to(dtype), randn(E, 2 * INTER, seed=2).to(dtype)
    down, down_bias = randn(E, H, INTER, seed=3).to(dtype), randn(E, H, seed=4).to(dtype)
    ids, weights = route(x, randn(E, H, seed=5).to(dtype), torch.zeros(E, dtype=dtype), K)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for k in range(K):
            e = int(ids[t, k])
            hidden = swiglu(gate_up[e].double() @ x[t].double() + gate_up_bias[e].double())
            y = down[e].double() @ hidden.double() + down_bias[e].double()
            expected[t] += weights[t, k].double() * y
    out = moe(x, ids, weights, gate_up, gate_up_bias, down, down_bias)
    assert out.dtype == dtype
    # Two roundings of a bfloat16 intermediate (2^-9 each) on sums of magnitude ~10.
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    error = (out.double() - expected).norm() / expected.norm()
    assert error < tolerance


def test_moe_leaves_unchosen_experts_alone() -> None:
    x = randn(2, H, seed=0)
    gate_up, down = randn(E, 2 * INTER, H, seed=1), randn(E, H, INTER, seed=3)
    gate_up[4], down[4] = torch.nan, torch.nan
    ids, weights = torch.tensor([[0, 2], [3, 0]]), torch.full((2, 2), 0.5)
    out = moe(x, ids, weights, gate_up, torch.zeros(E, 2 * INTER), down, torch.zeros(E, H))
    assert out.isfinite().all()


def test_every_byte_and_scale_dequantises_by_the_format() -> None:
    """Low nibble first; value * 2^(scale - 127); exact in bfloat16 wherever that has the exponent."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(1, 1, 3, 1)
    scales = torch.tensor([[[0, 127, 250]]], dtype=torch.uint8).repeat(1, 16, 1)
    matrix = ExpertMatrix(codes, scales)
    wide = dequantize_mxfp4(matrix)
    assert wide.shape == (1, 16, 96)
    expected = [
        FP4_VALUES[nibble] * 2.0 ** (scale - 127)
        for row in range(16)
        for scale in (0, 127, 250)
        for byte in range(16 * row, 16 * row + 16)
        for nibble in (byte & 15, byte >> 4)
    ]
    assert wide.flatten().tolist() == expected
    assert torch.equal(dequantize_mxfp4(matrix, torch.bfloat16).float(), wide)


def test_dequantisation_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (2, 12, 3), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(ExpertMatrix(blocks, scales)), theirs.transpose(1, 2))


def test_quantising_what_was_dequantised_changes_no_value() -> None:
    weight = dequantize_mxfp4(quantize_mxfp4(randn(3, 8, 64, seed=0)))
    assert torch.equal(dequantize_mxfp4(quantize_mxfp4(weight)), weight)


def test_quantisation_picks_a_nearest_value_of_the_block() -> None:
    weight = randn(2, 4, 64, seed=1)
    matrix = quantize_mxfp4(weight)
    narrow = dequantize_mxfp4(matrix)
    step = torch.exp2(matrix.scales.float() - 127).repeat_interleave(32, -1)
    candidates = torch.tensor(FP4_VALUES) * step.unsqueeze(-1)
    nearest = (candidates - weight.unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((narrow - weight).abs(), nearest)
    # The peak of a block lies in [4, 8) steps; above 6 it saturates, never by more than a quarter.
    assert ((narrow - weight).abs() <= 2 * step).all()


def test_norm_multiplies_in_float32_and_keeps_the_dtype() -> None:
    x, weight = randn(T, H, seed=0), randn(H, seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    narrow = rms_norm(x.bfloat16(), weight, 1e-5)
    assert narrow.dtype == torch.bfloat16
    wide = x.bfloat16().float()
    once = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight).bfloat16()
    assert (narrow != once).sum() <= 1  # one rounding, at the end


def test_add_then_norm_is_the_two_in_turn() -> None:
    x, residual, weight = randn(T, H, seed=0), randn(T, H, seed=1), randn(H, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_linear_is_rows_times_weight_plus_bias() -> None:
    x, weight, bias = randn(T, H, seed=0), randn(3, H, seed=1), randn(3, seed=2)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
