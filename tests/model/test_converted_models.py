"""Fast models given converted experts hold what those hold that convert them; built on a CPU, not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from antiphon.model import cuda_experts, cuda_load, cuda_transformer
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.load import read_parameters
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import preset
from antiphon.model.cuda_roads import Road
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.parallel import cuda_experts as rank_experts
from antiphon.model.parallel import cuda_load as rank_load
from antiphon.model.parallel import cuda_transformer as rank_transformer
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.load import read_shard
from antiphon.model.weight_cache.expert_parts import streamed_tensors
from antiphon.model.weight_cache.store import WeightCache

CPU = torch.device("cpu")
SHAPE = replace(
    preset("gpt-oss-20b"),
    num_hidden_layers=1,
    num_experts=2,
    vocab_size=64,
    num_attention_heads=16,
    num_key_value_heads=2,
    experts_per_token=1,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "two-experts"
    write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=6))
    return directory


@pytest.fixture(autouse=True)
def hopper_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the road of an H200 as far as it goes without one."""
    for module in (cuda_transformer, cuda_load):
        monkeypatch.setattr(module, "choose_road", lambda *_: Road.HOPPER)
        monkeypatch.setattr(module, "load_libraries", lambda: None)
    monkeypatch.setattr(cuda_transformer, "hopper_obstacle", lambda *_: None)
    monkeypatch.setattr(cuda_experts, "MoeWorkspace", lambda *_: None)
    monkeypatch.setattr(rank_experts, "MoeWorkspace", lambda *_: None)
    for library in ("LIBRARY", "SPLIT_LIBRARY"):
        monkeypatch.setattr(rank_experts.moe_build, library, SimpleNamespace(load=lambda: None))
    for module in (rank_transformer, rank_load):
        monkeypatch.setattr(module, "takes_hopper_experts", lambda *_: True)


def held(model: Any) -> list[torch.Tensor]:
    experts = model._experts
    routers = [tensor for router in experts._routers for tensor in router]
    return [*routers, *(tensor for layer in experts._layers for tensor in streamed_tensors(layer))]


def assert_all_equal(models: list[Any]) -> None:
    first, *others = (held(model) for model in models)
    assert len(first) == SHAPE.num_hidden_layers * 9
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({model.inexact_blocks for model in models}) == 1


def test_a_whole_model_from_a_checkpoint_from_the_cache_and_from_memory(
    checkpoint: Path, tmp_path: Path
) -> None:
    cache = WeightCache(tmp_path, 1 << 40)
    loaded = [
        cuda_load.load_cuda_model(checkpoint, "cpu", weight_cache=each) for each in (None, cache, cache)
    ]
    assert len(cache.files()) == 1
    index = open_checkpoint(checkpoint)
    in_memory = CudaTransformer(SHAPE, read_parameters(index), "cpu")
    assert_all_equal([in_memory, *loaded])


def test_the_ranks_of_dealt_out_experts(checkpoint: Path, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 40)
    for rank in range(2):
        layout = ParallelLayout(2, expert_parallel=True, rank=rank)
        group: Any = SimpleNamespace(rank=rank, size=2)
        store: Any = None
        loaded = [
            rank_load.load_cuda_rank(
                *(checkpoint, layout, group, store, CPU), peer_memory=False, weight_cache=each
            )
            for each in (None, cache, cache)
        ]
        assert len(cache.files()) == rank + 1
        shard = read_shard(open_checkpoint(checkpoint), layout)
        in_memory = rank_transformer.CudaRankTransformer(SHAPE, layout, group, shard, CPU)
        assert_all_equal([in_memory, *loaded])


def test_the_ranks_of_split_experts(checkpoint: Path, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 40)
    store: Any = None
    for rank in range(2):
        layout, group = ParallelLayout(2, rank=rank), cast(Any, SimpleNamespace(rank=rank, size=2))
        loaded = [
            rank_load.load_cuda_rank(
                *(checkpoint, layout, group, store, CPU),
                peer_memory=False,
                resident_fp8=True,
                weight_cache=each,
            )
            for each in (None, cache, cache)
        ]
        assert len(cache.files()) == rank + 1
        shard = read_shard(open_checkpoint(checkpoint), layout)
        in_memory = rank_transformer.CudaRankTransformer(SHAPE, layout, group, shard, CPU)
        assert_all_equal([in_memory, *loaded])
        for model in loaded:
            assert isinstance(model._experts, rank_experts.HopperRankExperts)
            assert model._experts.road == "Hopper", "FP8 tiles are of whole experts"
            (layer,) = model._experts._layers
            assert (layer.streamed.columns, layer.fp8) == (1536, None)
            assert bool(layer.streamed.down_bias.any()) == (rank == 0)


def test_converted_experts_are_refused_where_they_are_of_no_use(checkpoint: Path) -> None:
    parameters = read_parameters(open_checkpoint(checkpoint))
    with pytest.raises(ValueError, match="no use to the portable road"):
        CudaTransformer(SHAPE, parameters, "cpu", road=Road.PORTABLE, converted=[])
    with pytest.raises(ValueError, match="0 layers for a model of 1"):
        CudaTransformer(SHAPE, read_parameters(open_checkpoint(checkpoint)), "cpu", converted=[])
