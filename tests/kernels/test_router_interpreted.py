"""The Triton router against the plain op, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels import reference
from antiphon.kernels.router import route

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(1, 8, 128), (37, 32, 2880), (5, 128, 192), (16, 6, 96)]
)
def test_router_equals_the_plain_op(tokens: int, experts: int, hidden: int) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(tokens, hidden), torch.randn(experts, hidden), torch.randn(experts)
    ids, weights = route(x, weight, bias, 4)
    expected_ids, expected_weights = reference.route(x, weight, bias, 4)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_the_lowest_id_wins_among_equals() -> None:
    ids, weights = route(torch.zeros(2, 64), torch.randn(8, 64), torch.ones(8), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 0.25))


@pytest.mark.parametrize("live", [1, 16, 21, 37])
def test_padding_chooses_no_expert_and_changes_nobody(live: int) -> None:
    torch.manual_seed(live)
    x, weight, bias = torch.randn(37, 96), torch.randn(8, 96), torch.randn(8)
    alone, weights = route(x, weight, bias, 4)
    starts = torch.tensor([0, live], dtype=torch.int32)
    ids, same = route(x, weight, bias, 4, starts[-1:])
    assert torch.equal(ids[:live], alone[:live])
    assert torch.equal(same, weights)
    assert bool((ids[live:] == -1).all())


def test_logits_closer_than_bf16_can_tell_keep_their_order() -> None:
    """Around 8 two bf16 numbers lie 1/16 apart; these logits 1/512, exact in float32."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    weight = torch.full((32, 64), 0.125)
    weight[:, 0] = 0.125 + order / 512
    ids, weights = route(torch.ones(3, 64), weight, torch.zeros(32), 4)
    best = order.argsort(descending=True)[:4]
    assert torch.equal(ids, best.expand(3, 4))
    assert bool((weights.diff(dim=-1) < 0).all())
