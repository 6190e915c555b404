"""The fast model over ranks against the plain one, with its Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.dense.norm import add_rms_norm_
from antiphon.kernels.dense.rope import rope_and_write
from antiphon.kernels.reference import PagedSequences
from antiphon.model import cuda_attention
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel import cuda_load
from antiphon.model.parallel.cuda_transformer import CudaRankTransformer
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.reduce_limits import ReduceLimits, limits_of
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.transformer import Transformer

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="interpreter only; tests/model/test_parallel_nccl.py runs the real ones",
    ),
    pytest.mark.usefixtures("one_kernel_at_a_time"),
]
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def config(spread_config: GptOssConfig) -> GptOssConfig:
    return replace(
        spread_config,
        num_hidden_layers=2,
        intermediate_size=128,
        num_experts=4,
        experts_per_token=2,
        sliding_window=32,
    )


class CountedReduce:
    """Stands in for peer memory: the same sum over the communicator."""

    def __init__(self, group: RankGroup, max_rows: int = 4) -> None:
        self._group = group
        self.max_rows = max_rows
        self.calls = 0

    def add_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
    ) -> Tensor:
        self.calls += 1
        assert x.shape[0] <= self.max_rows
        assert not overlap
        return add_rms_norm_(self._group.communicator.all_reduce(x), residual, weight, eps)

    def close(self) -> None:
        """Nothing is shared."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize(("ranks", "experts"), [(1, False), (2, False), (2, True), (4, True)])
def test_the_fast_model_equals_the_plain_one(
    ranks: int, experts: bool, config: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    plain = Transformer(config, torch.float32)
    fill(plain, synthesize_parameters(config, seed=6))
    tokens = torch.randint(0, config.vocab_size, (21,), generator=torch.Generator().manual_seed(2))

    def steps(model: Any) -> Tensor:
        """Logits of the last token of a prompt and of two decode steps."""
        kv = one_sequence(model, 32, 16)
        found = [model.logits(model.forward(kv.batch(tokens[:19], 0), kv)[-1:])]
        found += [model.logits(model.forward(kv.batch(tokens[i : i + 1], i), kv)) for i in (19, 20)]
        return torch.cat(found)

    def work(group: RankGroup) -> tuple[Tensor, Tensor, int]:
        layout = ParallelLayout(ranks, experts, group.rank)
        parameters = shard_parameters(config, layout, synthesize_parameters(config, seed=6))
        reduce = CountedReduce(group)
        model = CudaRankTransformer(
            *(config, layout, group.communicator, parameters, torch.device("cpu")),
            row_reduce=reduce,
            dtype=torch.float32,
        )
        logits = steps(model)
        hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
        assert torch.equal(model.greedy(hidden), model.logits(hidden).argmax(-1))
        return logits, model.top_k(hidden, 3)[1], reduce.calls

    expected = steps(plain)
    results = in_ranks(ranks, work, timeout_s=120.0)
    for logits, best, calls in results:
        assert torch.equal(logits, results[0][0]), "every rank has the same bits"
        assert torch.equal(best, results[0][1])
        assert calls == 2 * (1 + 2 * config.num_hidden_layers), "decode steps alone take the fused sum"
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


class NoSums:
    """A communicator that must not be asked for a sum."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError(f"a sum of {list(x.shape)} over the communicator")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_a_chunk_of_a_rank_that_never_samples_takes_no_sum_over_the_communicator(
    config: GptOssConfig, in_ranks: Ranks
) -> None:
    """Up to the rows that one launch takes; the last layer ends with its keys and values, without a sum."""
    tokens = torch.randint(0, config.vocab_size, (19,), generator=torch.Generator().manual_seed(2))

    def work(group: RankGroup) -> int:
        layout = ParallelLayout(2, True, group.rank)
        reduce = CountedReduce(group, max_rows=24)
        pages = []
        for communicator, fused in ((group.communicator, None), (NoSums(group), reduce)):
            parameters = shard_parameters(config, layout, synthesize_parameters(config, seed=6))
            model = CudaRankTransformer(
                *(config, layout, communicator, parameters, torch.device("cpu")),
                row_reduce=fused,
                with_unembedding=False,
                dtype=torch.float32,
            )
            shape = (4, len(model.shape.kv_heads), 2, 16, config.head_dim)
            layers = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
            model.forward(padded_chunk(tokens, 24), SimpleNamespace(layer=layers.__getitem__))
            pages.append(torch.stack(layers))
        assert torch.equal(*pages)
        assert bool(pages[0][-1].any())
        return reduce.calls

    calls = 1 + 2 * (config.num_hidden_layers - 1)
    assert in_ranks(2, work, timeout_s=120.0) == [calls, calls]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_a_rank_on_an_h200_rotates_by_the_kernel_made_for_it(
    config: GptOssConfig, in_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch of Triton's less for the host, once a layer and step."""
    rotated: list[int] = []

    def rotate(
        qkv: Tensor,
        positions: Tensor,
        slot: Tensor,
        table: Tensor,
        kv: Tensor,
        query: Tensor,
        overlap: bool,
    ) -> Tensor:
        assert not overlap
        rotated.append(query.shape[1])
        return rope_and_write(qkv, positions, slot, table, kv, query.shape[1], query)

    monkeypatch.setattr(cuda_attention, "chunk_rope_and_write", rotate)
    tokens = torch.randint(0, config.vocab_size, (19,), generator=torch.Generator().manual_seed(2))

    def work(group: RankGroup) -> None:
        layout = ParallelLayout(2, True, group.rank)
        parameters = shard_parameters(config, layout, synthesize_parameters(config, seed=6))
        model = CudaRankTransformer(
            *(config, layout, group.communicator, parameters, torch.device("cpu")), dtype=torch.float32
        )
        pages = []
        for hopper in (False, True):
            model._attention._hopper = hopper
            shape = (4, len(model.shape.kv_heads), 2, 16, config.head_dim)
            layers = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
            model.forward(padded_chunk(tokens, 24), SimpleNamespace(layer=layers.__getitem__))
            pages.append(torch.stack(layers))
        assert torch.equal(*pages)

    in_ranks(2, work, timeout_s=120.0)
    assert rotated == [config.num_attention_heads // 2] * 2 * config.num_hidden_layers


def test_every_rank_shares_memory_for_its_sums(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of workers that sample and of those that do not, as many rows as the limits say."""
    made: list[tuple[Any, ...]] = []

    class Shared:
        def __init__(self, store: object, communicator: Any, limits: ReduceLimits, *rest: object) -> None:
            made.append((store, communicator.size, limits))
            self.max_rows = limits.max_rows

    monkeypatch.setattr(cuda_load, "FusedReduce", Shared)
    store: Any = object()
    communicator: Any = SimpleNamespace(rank=1, size=2)
    for samples in (True, False):
        model = cuda_load.load_cuda_rank(
            *(tiny_directory, ParallelLayout(2, True, 1), communicator, store, torch.device("cpu")),
            with_unembedding=samples,
        )
        assert model.facts()["row_reduce_rows"] == limits_of(2).max_rows
    assert made == [(store, 2, limits_of(2))] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_padding_of_a_chunk_changes_nothing_that_anybody_reads(config: GptOssConfig, in_ranks: Ranks) -> None:
    tokens = torch.randint(0, config.vocab_size, (19,), generator=torch.Generator().manual_seed(2))

    def work(group: RankGroup) -> None:
        layout = ParallelLayout(2, True, group.rank)
        parameters = shard_parameters(config, layout, synthesize_parameters(config, seed=6))
        model = CudaRankTransformer(
            *(config, layout, group.communicator, parameters, torch.device("cpu")), dtype=torch.float32
        )
        model.reserve(24)
        shape = (4, len(model.shape.kv_heads), 2, 16, config.head_dim)
        outcomes = []
        for padded in (19, 24):
            layers = [torch.full(shape, 50.0) for _ in range(config.num_hidden_layers)]
            kv = SimpleNamespace(layer=layers.__getitem__)
            outcomes.append((model.forward(padded_chunk(tokens, padded), kv), layers))
        (exact, one), (hidden, other) = outcomes
        assert bool(hidden.isfinite().all())
        torch.testing.assert_close(hidden[:19], exact, atol=1e-4, rtol=1e-4)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            assert bool((b[[1, 3]] == 50.0).all()), "padding is nowhere written"

    in_ranks(2, work, timeout_s=120.0)


def padded_chunk(tokens: Tensor, padded: int) -> ForwardBatch:
    """The first tokens of a sequence in pages 2, 0 of 16, padded to so many."""
    count = len(tokens)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    ids, positions = torch.zeros(padded, dtype=torch.int64), torch.zeros(padded, dtype=torch.int64)
    slot = torch.full((padded,), -1)
    ids[:count], positions[:count] = tokens, torch.arange(count)
    slot[:count] = table[0, positions[:count] // 16] * 16 + positions[:count] % 16
    starts = torch.tensor([0, count], dtype=torch.int32)
    pages = PagedSequences(table, starts, torch.tensor([count], dtype=torch.int32), slot)
    return ForwardBatch(ids, positions, pages, pages)
