"""The sampling kernels against the arithmetic that defines them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from antiphon.engine.sampling_math import draw_by_id, lowest_best, scaled_weights
from antiphon.kernels import sampling
from antiphon.kernels.sampling import choose_tokens

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)
VOCABULARY = 128 * 41


def logits_with_ties(rows: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return (torch.randn(rows, VOCABULARY) * 2).bfloat16().float()


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_takes_the_lowest_of_the_best(rows: int) -> None:
    logits = logits_with_ties(rows)
    logits[0, 77], logits[0, 4000] = 30.0, 30.0
    sampled = torch.full((rows,), -1)
    out = choose_tokens(logits, sampled)
    assert torch.equal(sampled, lowest_best(logits))
    assert torch.equal(out, torch.stack((sampled.double(), torch.zeros(rows).double()), 1))


def test_zeros_of_either_sign_are_equal_and_all_negative_rows_have_a_best() -> None:
    logits = torch.full((2, VOCABULARY), -1.0)
    logits[0, 9], logits[0, 5] = 0.0, -0.0
    logits[1, 31] = -0.5
    sampled = torch.zeros(2, dtype=torch.int64)
    choose_tokens(logits, sampled)
    assert sampled.tolist() == [5, 31]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_rows_that_are_not_finite_are_marked_and_yield_valid_ids() -> None:
    logits = logits_with_ties(3)
    logits[0, 123] = float("nan")
    logits[1] = float("-inf")
    for draws in (None, torch.ones(3).double()):
        sampled = torch.full((3,), -1)
        out = choose_tokens(logits, sampled, draws, None if draws is None else torch.full((3,), 0.5).double())
        assert out[:, 1].tolist() == [1.0, 1.0, 0.0]
        assert ((sampled >= 0) & (sampled < VOCABULARY)).all()


@pytest.mark.parametrize("rows", [1, 6])
def test_draws_are_the_inverse_transform_in_the_order_of_ids(rows: int) -> None:
    logits = logits_with_ties(rows)
    inverse = torch.linspace(0.5, 3.0, rows).double()
    for uniform in (0.0, 0.3, 0.77, 1.0 - 2.0**-53):
        uniforms = torch.full((rows,), uniform).double()
        sampled = torch.full((rows,), -1)
        out = choose_tokens(logits, sampled, inverse, uniforms)
        weights = scaled_weights(logits, inverse[:, None], None)
        assert torch.equal(sampled, draw_by_id(weights, uniforms[:, None]))
        assert torch.equal(out[:, 0].long(), sampled)


def test_weights_of_zero_are_never_drawn() -> None:
    logits = torch.full((1, VOCABULARY), -200.0)
    logits[0, 700] = 0.0
    for uniform in (0.0, 1.0 - 2.0**-53):
        sampled = torch.zeros(1, dtype=torch.int64)
        choose_tokens(logits, sampled, torch.ones(1).double(), torch.full((1,), uniform).double())
        assert sampled.tolist() == [700]


@triton.jit
def _last_draw(weight_ptr, cumulative_ptr, out_ptr, COUNT: tl.constexpr):
    """The index that the largest number below 1 draws."""
    index = tl.arange(0, COUNT)
    weights, cumulative = tl.load(weight_ptr + index), tl.load(cumulative_ptr + index)
    target = sampling._just_below(sampling._highest(cumulative, weights))
    tl.store(out_ptr, sampling._first_beyond(cumulative, weights, target, index, COUNT))


def test_sums_that_were_rounded_upwards_behind_the_last_weight_draw_no_weight_of_zero() -> None:
    """A running sum of many threads need not rise: each of its terms adds in an order of its own."""
    weights = torch.tensor([0.25, 0.75, 0.0, 0.0]).double()
    cumulative = torch.tensor([0.25, 1.0, 1.0 + 2.0**-52, 1.0]).double()
    found = torch.full((1,), -1, dtype=torch.int32)
    _last_draw[(1,)](weights, cumulative, found, COUNT=4)
    assert found.item() == 1
