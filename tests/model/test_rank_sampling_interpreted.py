"""Choosing over ranks by Triton's kernels, in the interpreter, against one GPU's and torch's form of it.

Where blocks of ids are cut alike, every sum has the same terms in the same order as in ``choose_tokens`` on
the whole logits, so tokens are equal whatever the draw. Otherwise, and in torch's form, only the rounding of
float64 sums and of torch's exponentials differs, which moves a draw that lies within some 1e-7 of a row of
the edge of a token's share, or 1e-15 without torch: of the draws here, which are always the same, none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.sampling import choose_tokens
from antiphon.model.parallel import vocabulary
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.vocabulary import choose_by_kernels, choose_by_torch, choose_over_ranks

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="interpreter only; tests/gpu/test_rank_sampling_cuda.py has real ones",
    ),
    pytest.mark.usefixtures("one_kernel_at_a_time"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes with numpy
]
Ranks = Callable[..., list[Any]]
ENDS = (0.0, 1.0 - 2.0**-53)
"""The least and the largest number that a draw may be given."""


def normal(rows: int, vocabulary: int) -> Tensor:
    """Logits of which some are equal."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).bfloat16().float()


def draws_of(rows: int) -> Tensor:
    """Of several temperatures, greedy rows and both ends among them."""
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    uniforms[: 2 * (rows // 2) : rows // 2] = torch.tensor(ENDS, dtype=torch.float64)
    inverse = torch.tensor([1.0, 0.7, 0.0, 2.0, 1e-3, 1e31, 1.0], dtype=torch.float64)
    return torch.stack((inverse.repeat(-(-rows // 7))[:rows], uniforms))


def drawn(uniforms: list[float], inverse: float = 1.0) -> Tensor:
    return torch.tensor([[inverse] * len(uniforms), uniforms], dtype=torch.float64)


def choose(
    whole: Tensor, ranks: int, in_ranks: Ranks, draws: Tensor | None = None, form: Any = choose_by_kernels
) -> Tensor:
    width = whole.shape[1] // ranks

    def work(group: RankGroup) -> Tensor:
        begin = group.rank * width
        mine = whole[:, begin : begin + width].contiguous()
        chosen: Tensor = form(mine, begin, group.communicator, draws)
        return chosen

    results = in_ranks(ranks, work)
    assert all(torch.equal(result, results[0]) for result in results)
    found: Tensor = results[0]
    assert found.dtype == torch.float64
    return found


def on_one_gpu(whole: Tensor, draws: Tensor | None = None) -> Tensor:
    """By ``choose_tokens``, which knows no greedy rows among drawn ones.

    Ids of weight zero behind the last one, up to a whole block, are never chosen. Without them blocks are as
    short as the vocabulary's largest divisor, and there is a program for every few of them.
    """
    whole = torch.nn.functional.pad(whole, (0, -whole.shape[1] % vocabulary.BLOCK), value=-math.inf)
    sampled = torch.full((len(whole),), -1)
    best = choose_tokens(whole, sampled)
    if draws is None:
        return best
    inverse = torch.where(draws[0] > 0, draws[0], 1.0)
    return torch.where(draws[0][:, None] > 0, choose_tokens(whole, sampled, inverse, draws[1]), best)


@pytest.mark.parametrize(("ranks", "width"), [(1, 3072), (2, 2048), (3, 1024), (4, 1024)])
def test_with_the_same_blocks_every_draw_is_that_of_one_gpu(ranks: int, width: int, in_ranks: Ranks) -> None:
    whole, draws = normal(14, ranks * width), draws_of(14)
    assert math.gcd(whole.shape[1], 1024) == vocabulary.BLOCK
    found = choose(whole, ranks, in_ranks, draws)
    assert torch.equal(found, on_one_gpu(whole, draws))
    assert len(set(found[:, 0].tolist())) > 7
    assert torch.equal(choose(whole, ranks, in_ranks), on_one_gpu(whole))


@pytest.mark.parametrize(
    ("ranks", "width"),
    [(1, 1), (2, 1), (4, 3), (2, 7), (4, 8), (1, 1571), (2, 1030), (3, 1025), (4, 1023)],
)
def test_with_other_blocks_draws_differ_by_rounding_alone(ranks: int, width: int, in_ranks: Ranks) -> None:
    """Widths of which a block is the most part, or one id; last blocks of one id, and of all but one."""
    whole, draws = normal(10, ranks * width), draws_of(10)
    found = choose(whole, ranks, in_ranks, draws)
    assert torch.equal(found, on_one_gpu(whole, draws))
    assert torch.equal(found, choose(whole, ranks, in_ranks, draws, choose_by_torch))
    assert torch.equal(choose(whole, ranks, in_ranks), on_one_gpu(whole))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_published_vocabulary(ranks: int, in_ranks: Ranks) -> None:
    whole, draws = normal(3, 201_088), drawn([0.6, *ENDS])
    found = choose(whole, ranks, in_ranks, draws)
    assert torch.equal(found, choose(whole, ranks, in_ranks, draws, choose_by_torch))


@pytest.mark.parametrize("draws", [None, torch.zeros(2, 6, dtype=torch.float64)], ids=["greedy", "rows"])
def test_of_equal_logits_the_lowest_id_is_the_best(draws: Tensor | None, in_ranks: Ranks) -> None:
    whole = torch.full((6, 4 * 1027), -1.0)
    whole[0, [5, 6]] = 1.0  # within a rank
    whole[1, [1026, 1027, 4000]] = 1.0  # on either side of an edge
    whole[2] = 0.5  # everywhere
    whole[3, [1500, 2900]] = torch.tensor([-0.0, 0.0])
    whole[4, [1500, 2900]] = torch.tensor([0.0, -0.0])
    whole[5, 3333] = -0.5
    found = choose(whole, 4, in_ranks, draws)
    assert found.tolist() == [[5, 0], [1026, 0], [0, 0], [1500, 0], [1500, 0], [3333, 0]]


def test_what_is_no_number_is_the_highest_and_yields_an_id_all_the_same(in_ranks: Ranks) -> None:
    whole = normal(6, 2 * 1100)
    # A NaN of either sign: processors make those with it where an operation is not defined.
    whole[0, [1300, 1700]] = torch.tensor([-(1 << 22), 0x7FC00000], dtype=torch.int32).view(torch.float32)
    whole[1] = math.nan
    whole[2] = -math.inf
    whole[3, [4, 2000]] = math.inf
    whole[4, [7, 8]] = torch.tensor([math.inf, math.nan])
    best = whole[5].argmax().item()
    assert choose(whole, 2, in_ranks).tolist() == [[1300, 1], [0, 1], [0, 1], [4, 1], [8, 1], [best, 0]]
    for uniform in (0.0, 0.4, ENDS[1]):
        found = choose(whole, 2, in_ranks, drawn([uniform] * 6))
        assert found[:, 1].tolist() == [1, 1, 1, 1, 1, 0]
        assert ((found[:, 0] >= 0) & (found[:, 0] < whole.shape[1])).all()
    greedy = torch.tensor([[0.0] * 6, [0.5] * 6], dtype=torch.float64)
    assert torch.equal(choose(whole, 2, in_ranks, greedy), choose(whole, 2, in_ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_of_zero_are_never_drawn(ranks: int, in_ranks: Ranks) -> None:
    """Nor is what lies behind a rank's last id."""
    whole = torch.full((6, 4400), -300.0)
    whole[0:2, 2300] = 0.0
    whole[2:4, [1, 1099]] = 0.0
    whole[4:6, [1100, 4399]] = -math.inf
    whole[4:6, [2199, 2200]] = 7.0
    found = choose(whole, ranks, in_ranks, drawn([*ENDS] * 3))
    assert found[:, 0].tolist() == [2300, 2300, 1, 1099, 2199, 2200]


def test_any_weight_counts_at_the_least_temperature_and_none_but_the_best_at_the_highest(
    in_ranks: Ranks,
) -> None:
    """At a scale that is 0 in float32 all finite logits weigh the same, and short blocks weigh no more."""
    whole = normal(4, 2 * 1100)
    whole[:, 1500] = 40.0
    flat, steep = drawn([0.25, 0.5, 0.9, ENDS[1]], 1e-60), drawn([*ENDS] * 2, math.inf)
    assert choose(whole, 2, in_ranks, flat)[:, 0].tolist() == [550, 1100, 1980, 2199]
    assert choose(whole, 2, in_ranks, steep)[:, 0].tolist() == [1500] * 4


class Counted:
    """A communicator that says what it was asked for."""

    def __init__(self, group: RankGroup) -> None:
        self._communicator = group.communicator
        self.rank, self.size = group.rank, group.size
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.asked.append(("all_gather", tuple(x.shape)))
        return self._communicator.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.asked.append(("all_reduce", tuple(x.shape)))
        return self._communicator.all_reduce(x)


def test_a_launch_stands_before_and_behind_each_exchange(
    in_ranks: Ranks, one_kernel_at_a_time: list[str]
) -> None:
    def work(draws: Tensor | None, group: RankGroup) -> list[tuple[str, tuple[int, ...]]]:
        counted = Counted(group)
        choose_by_kernels(whole[group.rank], group.rank * 1100, counted, draws)
        return counted.asked

    whole = torch.zeros(2, 3, 1100)
    (greedy, _), expected = in_ranks(2, lambda group: work(None, group)), [("all_gather", (3, 2))]
    assert greedy == expected
    assert sorted(one_kernel_at_a_time) == ["_finish_of_rank"] * 2 + ["_scan"] * 2
    one_kernel_at_a_time.clear()
    asked, _ = in_ranks(2, lambda group: work(draws_of(3), group))
    assert asked == [*expected, ("all_gather", (3, 2)), ("all_reduce", (3, 2))]
    assert sorted(one_kernel_at_a_time) == ["_finish_of_rank"] * 2 + ["_scan"] * 2 + ["_sum_blocks"] * 2


def test_on_a_cpu_torchs_operations_choose(in_ranks: Ranks, one_kernel_at_a_time: list[str]) -> None:
    whole, draws = normal(3, 64), draws_of(3)
    found = choose(whole, 2, in_ranks, draws, choose_over_ranks)
    assert not one_kernel_at_a_time
    assert torch.equal(found, choose(whole, 2, in_ranks, draws))
    assert one_kernel_at_a_time
