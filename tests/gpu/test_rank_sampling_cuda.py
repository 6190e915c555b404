"""Choosing over ranks by Triton's kernels against torch's form and one GPU's, with all ranks on one GPU.

``tests/model/test_parallel_nccl.py`` has two GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.kernels.sampling import choose_tokens
from antiphon.model.parallel import vocabulary
from antiphon.model.parallel.communicator import SingleRank
from antiphon.model.parallel.vocabulary import choose_by_torch, choose_over_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY = 201_088
ENDS = (0.0, 1.0 - 2.0**-53)
"""The least and the largest number that a draw may be given."""


class Turns:
    """What ranks share that are threads of one stream: one runs until it has to wait for the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=120.0)

    def wait(self) -> None:
        self.turn.release()
        self._barrier.wait()
        self.turn.acquire()


class RankInTurn:
    """One rank's communicator."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self.rank, self.size = rank, turns.size

    def all_gather(self, x: Tensor) -> Tensor:
        self._turns.slots[self.rank] = x
        self._turns.wait()
        everyone = torch.stack(self._turns.slots)
        self._turns.wait()
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0, dtype=x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        return self.all_gather(x)[0]


Form = Callable[..., Tensor]


def choose(whole: Tensor, ranks: int, draws: Tensor | None = None, form: Form = choose_over_ranks) -> Tensor:
    """What all ranks say."""
    width, turns = whole.shape[1] // ranks, Turns(ranks)

    def work(rank: int) -> Tensor:
        mine = whole[:, rank * width : (rank + 1) * width].contiguous()
        with turns.turn:
            return form(mine, rank * width, RankInTurn(turns, rank), draws)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(work, range(ranks)))
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


def on_one_gpu(whole: Tensor, draws: Tensor | None = None) -> Tensor:
    """By ``choose_tokens``, which knows no greedy rows among drawn ones."""
    sampled = torch.full((len(whole),), -1, device="cuda")
    best = choose_tokens(whole, sampled)
    if draws is None:
        return best
    inverse = torch.where(draws[0] > 0, draws[0], 1.0)
    return torch.where(draws[0][:, None] > 0, choose_tokens(whole, sampled, inverse, draws[1]), best)


def normal(*shape: int) -> Tensor:
    """Logits of which some are equal."""
    torch.manual_seed(shape[-2])
    return (torch.randn(*shape, device="cuda") * 3).bfloat16().float()


def draws_of(rows: int) -> Tensor:
    """Of several temperatures, greedy rows and both ends among them."""
    inverse = torch.linspace(0.5, 2.0, rows, dtype=torch.float64, device="cuda")
    uniforms = torch.rand(rows, dtype=torch.float64, device="cuda")
    if rows > 4:
        inverse[2::5] = 0.0
        uniforms[:2] = torch.tensor(ENDS, dtype=torch.float64)
    return torch.stack((inverse, uniforms))


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_choose_what_one_gpu_and_torch_choose(
    ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, draws = normal(rows, VOCABULARY), draws_of(rows)
    by_torch = choose(whole, ranks, draws, choose_by_torch)
    assert torch.equal(choose(whole, ranks, form=choose_by_torch), on_one_gpu(whole))
    monkeypatch.delattr(vocabulary, "choose_by_torch")  # on a GPU kernels alone choose
    assert torch.equal(choose(whole, ranks), on_one_gpu(whole))
    found = choose(whole, ranks, draws)
    # Exponentials are the same; only float64 sums are rounded in another order.
    assert torch.equal(found, on_one_gpu(whole, draws))
    different = int((found != by_torch).any(-1).sum())
    print(f"{different} of {rows} draws differ from torch's")
    # Exponentials may differ in their last bit, which moves a draw only at the very edge of a token's share.
    assert different <= rows // 100


@pytest.mark.parametrize(("ranks", "width"), [(1, 1), (2, 7), (4, 3), (3, 1025), (4, 1023), (2, 2048)])
def test_small_vocabularies(ranks: int, width: int) -> None:
    whole, draws = normal(64, ranks * width), draws_of(64)
    found = choose(whole, ranks, draws)
    assert torch.equal(found, on_one_gpu(whole, draws))
    assert int((found != choose(whole, ranks, draws, choose_by_torch)).any(-1).sum()) <= 1
    assert torch.equal(choose(whole, ranks), on_one_gpu(whole))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_of_zero_and_what_is_no_number(ranks: int) -> None:
    whole = torch.full((12, 4400), -300.0, device="cuda")
    whole[0:2, 2300] = 0.0
    whole[2:4, [1, 1099]] = 0.0
    whole[4:6, [2199, 2200]] = 7.0
    whole[6:8] = float("-inf")
    whole[8:10, [3000, 3500]] = float("nan")
    whole[10:12, 1700] = float("inf")
    draws = torch.tensor([[1.0] * 12, [*ENDS] * 6], dtype=torch.float64, device="cuda")
    found = choose(whole, ranks, draws)
    assert found[:6, 0].tolist() == [2300, 2300, 1, 1099, 2199, 2200]
    assert found[:, 1].tolist() == [0] * 6 + [1] * 6
    assert ((found[:, 0] >= 0) & (found[:, 0] < 4400)).all()
    greedy = choose(whole, ranks, draws * torch.tensor([[0.0], [1.0]], device="cuda"))
    assert torch.equal(greedy, choose(whole, ranks))
    assert greedy[::2].tolist() == [[2300, 0], [1, 0], [2199, 0], [0, 1], [3000, 1], [1700, 1]]


@pytest.mark.parametrize("with_draws", [False, True])
def test_a_graph_of_it_chooses_anew_each_time(with_draws: bool) -> None:
    """Nothing in it waits for the host."""
    logits, draws = normal(8, VOCABULARY), draws_of(8) if with_draws else None
    choose_over_ranks(logits, 0, SingleRank(), draws)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choose_over_ranks(logits, 0, SingleRank(), draws)
    seen = []
    for turn in range(3):
        logits.copy_(logits.roll(turn, dims=1))
        graph.replay()
        assert torch.equal(out, on_one_gpu(logits, draws))
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])


@alone_and_beside_copies
@pytest.mark.parametrize("with_draws", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_every_choice_is_the_same(rows: int, with_draws: bool, beside: bool) -> None:
    logits = normal(2, rows, VOCABULARY // 2)
    draws = draws_of(rows) if with_draws else None

    def launch(turn: int, out: Tensor) -> None:
        out.copy_(choose_over_ranks(logits[turn], 0, SingleRank(), draws))

    check_launches(launch, torch.full((rows, 2), -1.0, dtype=torch.float64, device="cuda"), beside=beside)
