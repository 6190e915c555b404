"""Choosing over ranks equals choosing over the whole row, ties and NaN included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.sampling_math import draw_by_id, scaled_weights
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.vocabulary import argmax_over_ranks, choose_over_ranks, top_k_over_ranks

Ranks = Callable[..., list[Any]]
WIDTH = 8


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor([row + [-9.0] * (4 * WIDTH - len(row)) for row in rows])


def columns(whole: Tensor, group: RankGroup) -> tuple[Tensor, int]:
    begin = group.rank * WIDTH
    return whole[:, begin : begin + WIDTH], begin


def argmax(whole: Tensor, in_ranks: Ranks) -> list[int]:
    results = in_ranks(
        4, lambda group: argmax_over_ranks(*columns(whole, group), group.communicator).tolist()
    )
    assert results == [results[0]] * 4
    chosen: list[int] = results[0]
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_equals_that_of_whole_rows(dtype: torch.dtype, in_ranks: Ranks) -> None:
    whole = torch.randn(50, 4 * WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert argmax(whole, in_ranks) == whole.float().numpy().argmax(-1).tolist()


def test_argmax_takes_the_lowest_id_of_a_tie(in_ranks: Ranks) -> None:
    tied = logits([0.0] * 3, [0.0] * 3, [0.0] * 3)
    tied[0, [5, 6]] = 1.0  # within a rank
    tied[1, [9, 25]] = 1.0  # across ranks
    tied[2] = 0.0  # everywhere
    assert argmax(tied, in_ranks) == [5, 9, 0]


def test_a_nan_is_the_highest_as_it_is_for_the_sampler(in_ranks: Ranks) -> None:
    whole = logits([1.0], [1.0], [math.inf])
    whole[0, 30] = math.nan
    whole[1, [12, 20]] = math.nan
    assert argmax(whole, in_ranks) == [30, 12, 0]
    assert argmax(whole, in_ranks) == whole.numpy().argmax(-1).tolist()


def choose(whole: Tensor, in_ranks: Ranks, draws: Tensor | None = None) -> Tensor:
    results = in_ranks(4, lambda group: choose_over_ranks(*columns(whole, group), group.communicator, draws))
    assert all(torch.equal(result, results[0]) for result in results)
    found: Tensor = results[0]
    return found


def test_greedy_choice_says_whether_the_best_is_finite(in_ranks: Ranks) -> None:
    whole = logits([0.0] * 32, [1.0], [1.0], [-math.inf] * 32)
    whole[0, [9, 25]] = 3.0
    whole[1, [12, 20]] = math.nan
    whole[2, 31] = math.inf
    assert choose(whole, in_ranks).tolist() == [[9, 0], [12, 1], [31, 1], [0, 1]]


def test_draws_equal_those_from_whole_rows(in_ranks: Ranks) -> None:
    """Every share of the whole, both ends included, at several temperatures; greedy rows between them."""
    generator = torch.Generator().manual_seed(5)
    rows = 400
    whole = torch.randn(rows, 4 * WIDTH, generator=generator) * 3
    whole[:, 7:11] = -math.inf  # across two ranks: never drawn
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    inverse = torch.tensor([1.0, 0.0, 2.0, 1e-3, 1e31], dtype=torch.float64).repeat(rows // 5)
    found = choose(whole, in_ranks, torch.stack((inverse, uniform)))
    drawn = draw_by_id(scaled_weights(whole, inverse[:, None], None), uniform[:, None])
    expected = torch.where(inverse > 0, drawn, whole.argmax(-1))
    assert found[:, 0].long().tolist() == expected.tolist()
    assert not found[:, 1].any()
    assert len(set(found[:, 0].tolist())) > 20, "most ids were drawn"
    assert not set(range(7, 11)) & {int(token) for token in found[:, 0].tolist()}


def test_a_draw_from_what_is_no_number_is_an_id_all_the_same(in_ranks: Ranks) -> None:
    whole = logits([math.nan] * 32, [-math.inf] * 32, [math.inf] * 32)
    found = choose(whole, in_ranks, torch.tensor([[1.0] * 3, [0.3, 0.5, 0.9]], dtype=torch.float64))
    assert found[:, 1].tolist() == [1, 1, 1]
    assert all(0 <= token < 4 * WIDTH for token in found[:, 0].tolist())


def top_k(whole: Tensor, k: int, in_ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    return in_ranks(4, lambda group: top_k_over_ranks(*columns(whole, group), k, group.communicator))


@pytest.mark.parametrize("k", [1, 3, WIDTH, WIDTH + 5, 4 * WIDTH])
def test_top_k_equals_that_of_whole_rows(k: int, in_ranks: Ranks) -> None:
    whole = torch.randn(20, 4 * WIDTH, generator=torch.Generator().manual_seed(1))
    expected = torch.topk(whole, k)
    for values, ids in top_k(whole, k, in_ranks):
        assert torch.equal(values, expected.values)
        assert torch.equal(ids, expected.indices)


def test_top_k_lists_equal_logits_by_id(in_ranks: Ranks) -> None:
    tied = [[3, 11, 19], [1, 4, 5, 6, 7], [7, 8, 9, 30]]  # across ranks, within one, both
    whole = logits([0.0] * 30, [0.0] * 30, [0.0] * 30)
    for row, ids in enumerate(tied):
        whole[row, ids] = 2.0
    for k in (3, 4, 5):
        values, found = top_k(whole, k, in_ranks)[2]
        for row, ids in enumerate(tied):
            if len(ids) == k:
                assert found[row].tolist() == ids
                assert values[row].tolist() == [2.0] * k


@pytest.mark.parametrize("k", [0, 4 * WIDTH + 1])
def test_more_than_the_vocabulary_is_refused(k: int, in_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=rf"k {k} is not within 1 \.\. 32"):
        top_k(logits([0.0]), k, in_ranks)
