"""Small checkpoints and a minimal paged KV cache for tests of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import fill, load_model
from antiphon.model.checkpoint.synthesize import synthesize, synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer

MINI = GptOssConfig(
    num_hidden_layers=2,
    num_experts=4,
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    experts_per_token=2,
)
"""Small enough to write one checkpoint per fault."""

SPREAD = GptOssConfig(
    num_hidden_layers=4,
    num_experts=8,
    vocab_size=128,
    hidden_size=64,
    intermediate_size=160,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    experts_per_token=3,
    sliding_window=24,
    max_context_tokens=4096,
)
"""Goes over 1, 2 and 4 ranks; its 5 blocks of expert columns over 2 or 4 only unevenly. A short window."""

Write = Callable[..., Path]
Ranks = Callable[..., list[Any]]
Forward = Callable[..., Tensor]


class OneSequence:
    """Paged KV of one sequence whose pages lie in a shuffled order, and the batches that fill it."""

    def __init__(self, model: Any, capacity: int, page_size: int) -> None:
        config = model.config
        pages = -(-capacity // page_size)
        heads = config.num_key_value_heads
        if not isinstance(model, Transformer):  # one rank of several
            heads = len(model.shape.kv_heads)
        shape = (pages, heads, 2, page_size, config.head_dim)
        self._layers = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
        self._pages = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
        self._page_size = page_size

    def layer(self, index: int) -> Tensor:
        return self._layers[index]

    def batch(self, token_ids: Tensor, begin: int) -> ForwardBatch:
        end = begin + len(token_ids)
        positions = torch.arange(begin, end)
        slot = self._pages[positions // self._page_size] * self._page_size + positions % self._page_size
        sequences = PagedSequences(
            block_table=self._pages.int()[None],
            query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            kv_len=torch.tensor([end], dtype=torch.int32),
            slot=slot,
        )
        return ForwardBatch(token_ids, positions, sequences, sequences)


def forward_chunks(
    model: Transformer | ParallelTransformer, token_ids: Tensor, chunk: int | None = None, page: int = 16
) -> Tensor:
    """Final-norm hidden states [T, H] of one prompt, computed whole or ``chunk`` tokens at a time."""
    kv = OneSequence(model, len(token_ids), page)
    step = chunk or len(token_ids)
    return torch.cat(
        [model.forward(kv.batch(token_ids[b : b + step], b), kv) for b in range(0, len(token_ids), step)]
    )


@pytest.fixture(scope="session")
def forward() -> Forward:
    return forward_chunks


@pytest.fixture(scope="session")
def one_sequence() -> type[OneSequence]:
    return OneSequence


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synthesize(directory, like="tiny", seed=0)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path) -> Transformer:
    return load_model(tiny_directory, torch.float32)


@pytest.fixture(scope="session")
def mini_config() -> GptOssConfig:
    return MINI


@pytest.fixture
def write_mini(tmp_path: Path) -> Write:
    """Writes a mini checkpoint into a fresh folder."""

    def write(
        layout: Layout = Layout.HUGGING_FACE, seed: int = 0, max_shard_bytes: int = 10**9, name: str = "mini"
    ) -> Path:
        directory = tmp_path / name
        write_checkpoint(directory, MINI, synthesize_parameters(MINI, seed), layout, max_shard_bytes)
        return directory

    return write


def run_in_ranks(
    size: int, work: Callable[[RankGroup], Any], timeout_s: float = 120.0, cuda: bool = False
) -> list[Any]:
    """What ``work`` returns on each rank; the ranks are threads, joined over loopback or, on GPUs, NCCL.

    When one raises, the others' collectives fail; the error of the one that was first is raised here.
    """
    store = dist.HashStore()
    groups: list[RankGroup] = []

    def rank_main(rank: int) -> Any:
        device = f"cuda:{rank}" if cuda else "cpu"
        group = RankGroup.join(store, rank, size, device=device, timeout_s=timeout_s)
        groups.append(group)
        return work(group)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is None:
            results = [future.result() for future in futures]
        for group in groups:
            group.close()
        if failed is not None:
            raise failed.exception() or AssertionError
    return results


@pytest.fixture(scope="session")
def in_ranks() -> Ranks:
    return run_in_ranks


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The interpreter changes Triton's own module while a kernel runs, and ranks are threads here.

    Returns the list to which the name of every kernel that is launched is added.
    """
    from triton.runtime.interpreter import GridExecutor

    turn, run, launched = threading.Lock(), GridExecutor.__call__, []

    def locked(self: Any, *arguments: Any, **named: Any) -> Any:
        with turn:
            launched.append(self.fn.__name__)
            return run(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
    return launched


@pytest.fixture(scope="session")
def spread_config() -> GptOssConfig:
    return SPREAD


@pytest.fixture(scope="session")
def small() -> GptOssConfig:
    """The same with two layers."""
    return replace(SPREAD, num_hidden_layers=2)


def build_part(config: GptOssConfig, group: RankGroup, **options: Any) -> ParallelTransformer:
    """This rank's part of a random model."""
    layout = ParallelLayout(group.size, True, group.rank)
    model = ParallelTransformer(config, layout, group.communicator, torch.float32, **options)
    fill(
        model,
        (
            (name, part)
            for name, part in shard_parameters(config, layout, synthesize_parameters(config))
            if model.unembedding is not None or name != "unembedding.weight"
        ),
    )
    return model


@pytest.fixture(scope="session")
def build() -> Callable[..., ParallelTransformer]:
    return build_part
