"""Decode attention on the GPU against the plain op in float32: every split, edge and offset, in and out of
graphs, with NaN in everything that nobody wrote."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.reference import PagedSequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S, D, WINDOW = 64, 64, 128
SCALE = 0.125
BOUND = 5e-3


class Paged:
    """One token each of sequences in shuffled pages."""

    def __init__(self, lengths: list[int], kv_heads: int = 8) -> None:
        torch.manual_seed(len(lengths))
        each = -(-max(lengths) // S)
        total = len(lengths) * each + 1
        table = torch.randperm(total)[: total - 1].view(len(lengths), each)
        length = torch.tensor(lengths)
        position = torch.arange(each * S).view(each, 1, 1, S, 1)
        cache = torch.randn(total, 3, kv_heads, 2, S, D).bfloat16()
        for row in range(len(lengths)):
            cache[table[row]] = cache[table[row]].masked_fill(position[:, None] >= length[row], float("nan"))
        self.layer = cache.cuda()[:, 1]
        self.query = torch.randn(len(lengths), 8 * kv_heads, D).bfloat16().cuda()
        self.sinks = (torch.randn(8 * kv_heads) * 2).cuda()
        self.sequences = PagedSequences(
            table.int().cuda(),
            torch.arange(len(lengths) + 1, dtype=torch.int32).cuda(),
            length.int().cuda(),
            torch.zeros(len(lengths), dtype=torch.int64).cuda(),
        )

    def run(self, kernel: DecodeAttention, window: int | None) -> Tensor:
        return self.into(torch.full_like(self.query, float("nan")), self.query, kernel, window)

    def into(self, out: Tensor, query: Tensor, kernel: DecodeAttention, window: int | None) -> Tensor:
        if window is None:
            return kernel.full(query, self.layer, self.sequences, self.sinks, SCALE, out)
        return kernel.sliding(query, self.layer, self.sequences, self.sinks, window, SCALE, out)

    def expected(self, window: int | None) -> Tensor:
        layer = self.layer.nan_to_num(0.0).float()
        return reference.paged_attention(self.query.float(), layer, self.sequences, self.sinks, window, SCALE)

    def kernel(
        self, splits: int | None = None, pdl: bool = True, stages: int | None = None, ahead: bool = True
    ) -> DecodeAttention:
        heads = self.query.shape[1]
        shape = (len(self.query), heads, heads // 8, D, self.query.device)
        return DecodeAttention(*shape, splits=splits, pdl=pdl, stages=stages, ahead=ahead)


EDGES = [1, 63, 64, 65, 127, 128, 129, 130, 1000]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 13, 20, 32, 64])
def test_any_number_of_splits(splits: int, pdl: bool) -> None:
    paged = Paged(EDGES)
    kernel = paged.kernel(splits, pdl)
    out = paged.run(kernel, None)
    assert relative_error(out, paged.expected(None)) <= BOUND
    assert torch.equal(out, paged.run(kernel, None)), "bit for bit from run to run"


@alone_and_beside_copies
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("splits", "stages"), [(1, 5), (3, 7), (3, 9), (20, 7)])
def test_every_launch_is_the_same_however_many_pages_are_under_way(
    splits: int, stages: int, ahead: bool, beside: bool
) -> None:
    paged = Paged(EDGES)
    kernel = paged.kernel(splits, stages=stages, ahead=ahead)
    assert relative_error(paged.run(kernel, None), paged.expected(None)) <= BOUND
    queries = paged.query, torch.randn_like(paged.query)

    def launch(turn: int, out: Tensor) -> None:
        paged.into(out, queries[turn], kernel, None)

    check_launches(launch, torch.full_like(paged.query, float("nan")), beside=beside)


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (20, None), (1, WINDOW)])
def test_every_launch_is_the_same(splits: int, window: int | None, pdl: bool, beside: bool) -> None:
    """More pages than are under way at one time, and fewer; in one part, and in some that are merged."""
    paged = Paged(EDGES)
    kernel = paged.kernel(splits, pdl)
    queries = paged.query, torch.randn_like(paged.query)

    def launch(turn: int, out: Tensor) -> None:
        paged.into(out, queries[turn], kernel, window)

    check_launches(launch, torch.full_like(paged.query, float("nan")), beside=beside)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_window_is_right_at_every_offset_in_its_pages(pdl: bool) -> None:
    paged = Paged(list(range(1, 2 * WINDOW + 8)), kv_heads=1)
    out = paged.run(paged.kernel(pdl=pdl), WINDOW)
    assert relative_error(out, paged.expected(WINDOW)) <= BOUND
    assert relative_error(out[200:], paged.expected(WINDOW + 1)[200:]) > BOUND, "one key more would be seen"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_of_a_rank(kv_heads: int) -> None:
    paged = Paged(EDGES, kv_heads)
    for window in (None, WINDOW):
        out = paged.run(paged.kernel(pdl=False), window)
        assert relative_error(out, paged.expected(window)) <= BOUND


@pytest.mark.parametrize("batch", [1, 40, 1100])
def test_replayed_from_a_graph_it_follows_the_lengths(batch: int) -> None:
    """The largest batch is beyond what others' kernels could be captured with."""
    paged = Paged([100 + row % 150 for row in range(batch)], kv_heads=1)
    kernel = paged.kernel()
    results = [torch.empty(0)] * 2
    paged.run(kernel, None)
    paged.run(kernel, WINDOW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [paged.run(kernel, window) for window in (None, WINDOW)]
    for shorter in (0, 37):
        paged.sequences.kv_len.sub_(shorter)
        graph.replay()
        for out, window in zip(results, (None, WINDOW), strict=True):
            assert relative_error(out, paged.expected(window)) <= BOUND


def test_a_large_sink_takes_all_weight_and_a_small_one_none() -> None:
    paged = Paged(EDGES)
    for splits in (1, 5):
        paged.sinks.fill_(60.0)
        assert float(paged.run(paged.kernel(splits), None).float().abs().max()) < 1e-6
        paged.sinks.fill_(-1e4)
        assert relative_error(paged.run(paged.kernel(splits), None), paged.expected(None)) <= BOUND
