"""The fast model over ranks against the plain one, with its Triton kernels in the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.dense.norm import add_rms_norm_
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.cuda_transformer import CudaRankTransformer
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.transformer import Transformer

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/model/test_parallel_nccl.py runs the real ones"
)
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


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter changes Triton's own module while a kernel runs, and ranks are threads here."""
    from triton.runtime.interpreter import GridExecutor

    turn, run = threading.Lock(), GridExecutor.__call__

    def locked(self: Any, *arguments: Any, **named: Any) -> Any:
        with turn:
            return run(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


class CountedReduce:
    """Stands in for peer memory: the same sum over the communicator."""

    max_rows = 4

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.calls = 0

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.calls += 1
        assert x.shape[0] <= self.max_rows
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
        assert calls == 2 * 2 * config.num_hidden_layers, "decode steps alone take the fused sum"
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


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
