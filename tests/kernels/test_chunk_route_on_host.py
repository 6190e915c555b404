"""Router and ranks of a chunk in one launch, thread by thread on the host, against the plain ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.chunk_route import GROUP
from antiphon.kernels.moe.streamed import DIM

POISON = -(2**30)


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"moe/csrc/{name}.cu" for name in ("chunk_route", "fp8_route")])


class Places:
    """What ranking leaves, poisoned."""

    def __init__(self, pairs: int, held: int, tile: int) -> None:
        self.rank = torch.full((pairs,), POISON, dtype=torch.int32)
        self.counts, self.first_tile = (torch.full((held,), POISON, dtype=torch.int32) for _ in range(2))
        self.tiles = torch.full((pairs // tile + held, 4), POISON, dtype=torch.int32)
        self.tile_count = torch.full((1,), POISON, dtype=torch.int32)

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.rank, self.counts, self.first_tile, self.tiles, self.tile_count


def run(
    library: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    live: int | None = None,
    held: range | None = None,
    tile: int = 32,
) -> tuple[Tensor, Tensor]:
    """Ids and weights of two launches, which must be alike; ranks and tiles must be as by themselves."""
    tokens, experts = x.shape[0], weight.shape[0]
    held = range(experts) if held is None else held
    groups = -(-tokens // GROUP)
    partial = torch.full((4 * tokens * experts,), float("nan"))
    group_counts = torch.full((groups, len(held)), POISON, dtype=torch.int32)
    tickets = torch.zeros(1 + groups, dtype=torch.int32)
    padding = None if live is None else torch.tensor([live], dtype=torch.int32)
    results = []
    for _ in range(2):
        places = Places(4 * tokens, len(held), tile)
        ids = torch.full((tokens, 4), -9)
        weights = torch.full((tokens, 4), float("nan")).bfloat16()
        library.call(
            "moe_chunk_route",
            *(x, weight, bias, padding, partial, ids, weights, *places.all, group_counts, tickets),
            *(tokens, experts, held.start, len(held), tile, 1),
        )
        assert not tickets.any()
        results.append((ids, weights, *places.all))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    ids, weights, *found = results[0]
    plain = Places(4 * tokens, len(held), tile)
    rank, counts, first_tile, tiles, tile_count = plain.all
    ticket = torch.zeros(1, dtype=torch.int32)
    library.call(
        "moe_fp8_rank",
        *(ids, rank, counts, first_tile, tiles, tile_count, ticket),
        *(ids.numel(), held.start, len(held), tile),
    )
    for name, ours, theirs in zip(vars(plain), found, plain.all, strict=True):
        assert torch.equal(ours, theirs), name
    return ids, weights


def inputs(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + experts)
    weight = (torch.randn(experts, DIM) / DIM**0.5).bfloat16()
    return torch.randn(tokens, DIM).bfloat16(), weight, torch.randn(experts).bfloat16()


@pytest.mark.parametrize(
    ("tokens", "experts", "held", "live"),
    [
        (1, 128, None, None),
        (33, 32, None, 32),
        (70, 128, range(64, 128), 65),
        (45, 32, range(8, 16), None),
        (40, 8, None, 0),
        (2 * GROUP, 128, range(32), 2 * GROUP),
    ],
)
def test_choices_ranks_and_tiles(
    library: Any, tokens: int, experts: int, held: range | None, live: int | None
) -> None:
    x, weight, bias = inputs(tokens, experts)
    ids, weights = run(library, x, weight, bias, live, held)
    expected, shares = reference.route(x.double(), weight.double(), bias.double(), 4)
    seen = tokens if live is None else live
    assert torch.equal(ids[:seen], expected[:seen])
    assert bool((ids[seen:] == -1).all())
    torch.testing.assert_close(weights.double(), shares, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tile", [32, 288])
def test_pairs_of_many_groups_have_their_order(library: Any, tile: int) -> None:
    """Twenty-two groups in four parts, none a whole number of batches; few experts, so that tiles fill."""
    tokens = 21 * GROUP + 5
    x, weight, bias = inputs(tokens, 8)
    run(library, x, weight, bias, tokens - 3, tile=tile)


@pytest.mark.parametrize("experts", [32, 128])
def test_the_lowest_id_wins_among_equals(library: Any, experts: int) -> None:
    x, zeros = torch.randn(3, DIM).bfloat16(), torch.zeros(experts, DIM).bfloat16()
    bias = torch.zeros(experts).bfloat16()
    bias[::2] = -0.0  # equal to the other zero
    ids, weights = run(library, x, zeros, bias)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert bool((weights == 0.25).all())


def test_logits_closer_than_bf16_can_tell_keep_their_order(library: Any) -> None:
    """Around 8 two bf16 numbers lie 1/16 apart; these logits 1/2048, exact in float32 in any order."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(128, DIM)
    weight[:, :64] = 0.125
    weight[:, 2000] = order / 2048
    ids, _ = run(library, torch.ones(2, DIM).bfloat16(), weight.bfloat16(), torch.zeros(128).bfloat16())
    assert torch.equal(ids, order.argsort(descending=True)[:4].expand(2, 4))


def test_every_column_counts_once(library: Any) -> None:
    """A token has one column; the expert that reads it wins."""
    columns = torch.arange(0, DIM, 61)  # of every slice and every place in a step of 32
    x = torch.zeros(len(columns), DIM)
    x[torch.arange(len(columns)), columns] = 1
    weight = torch.zeros(32, DIM)
    every = torch.arange(DIM)
    weight[every % 32, every] = 1.0 + every % 7
    ids, weights = run(library, x.bfloat16(), weight.bfloat16(), torch.zeros(32).bfloat16())
    assert torch.equal(ids[:, 0], columns % 32)
    best = torch.exp(1.0 + columns % 7)
    torch.testing.assert_close(weights[:, 0].float(), best / (best + 3), rtol=2**-8, atol=0)


def test_nan_reaches_its_own_token_only(library: Any) -> None:
    x, weight, bias = inputs(40, 32)
    clean, shares = run(library, x, weight, bias)
    x[7, 100] = float("nan")
    ids, weights = run(library, x, weight, bias)
    others = torch.arange(40) != 7
    assert torch.equal(ids[others], clean[others])
    assert torch.equal(weights[others], shares[others])
    assert ids[7].tolist() == [0, 0, 0, 0]
    assert bool(weights[7].isnan().all())


@pytest.mark.parametrize("left", [1, 2, 3])
def test_experts_that_cannot_be_chosen_have_no_weight(library: Any, left: int) -> None:
    """Minus infinity for all but some: those share the weight, and the lowest ids stand for the others."""
    x, weight, bias = inputs(33, 32)
    able = torch.tensor([30, 7, 19])[:left]
    barred = torch.ones(32, dtype=torch.bool)
    barred[able] = False
    bias[barred] = float("-inf")
    ids, weights = run(library, x, weight, bias)
    expected, shares = reference.route(x.double(), weight.double(), bias.double(), 4)
    assert torch.equal(ids[:, :left], expected[:, :left])
    assert ids[:, left:].tolist() == [[*range(4 - left)]] * 33
    torch.testing.assert_close(weights[:, :left].double(), shares[:, :left], rtol=2**-8, atol=1e-6)
    assert not bool(weights[:, left:].any())


def test_a_token_is_the_same_in_any_chunk(library: Any) -> None:
    x, weight, bias = inputs(50, 128)
    ids, weights = run(library, x, weight, bias)
    alone = run(library, x[37:40].contiguous(), weight, bias)
    assert torch.equal(alone[0], ids[37:40])
    assert torch.equal(alone[1], weights[37:40])
