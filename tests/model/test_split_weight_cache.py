"""Converted experts that ranks hold columns of, on disk: each rank's own again, and never another's."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import ExpertMatrix
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.layout import ParameterSpec
from antiphon.model.checkpoint.read import ParameterReader
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import preset
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_weights import collect_parameters, layer_experts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.weight_cache import expert_parts, weight_file
from antiphon.model.weight_cache import load_experts as load_experts_module
from antiphon.model.weight_cache.expert_share import ExpertShare
from antiphon.model.weight_cache.fingerprint import expert_fingerprint
from antiphon.model.weight_cache.load_experts import LoadedExperts, Origin, load_experts
from antiphon.model.weight_cache.store import CachedFile, WeightCache

CPU = torch.device("cpu")
SHAPE = replace(
    preset("gpt-oss-20b"),
    num_hidden_layers=1,
    num_experts=2,
    vocab_size=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    experts_per_token=1,
)
LAYOUTS = [ParallelLayout(ranks, rank=rank) for ranks in (2, 4, 8) for rank in range(ranks)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    directory = tmp_path_factory.mktemp("checkpoints") / "two-experts"
    write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=3))
    return open_checkpoint(directory)


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 10 << 30)


def load(index: CheckpointIndex, layout: ParallelLayout, cache: WeightCache | None) -> LoadedExperts:
    return load_experts(index, layout, CPU, resident_fp8=False, cache=cache)


def converted(layout: ParallelLayout) -> ConvertedExperts:
    """The rank's part of parameters in memory."""
    shard = shard_parameters(SHAPE, layout, synthesize_parameters(SHAPE, seed=3))
    return layer_experts(collect_parameters(shard, CPU, False), 0).convert(False)


def same(found: LoadedExperts, wanted: ConvertedExperts) -> bool:
    (layer,) = found.layers
    pairs = zip(expert_parts.streamed_tensors(layer), expert_parts.streamed_tensors(wanted), strict=True)
    return layer.inexact == wanted.inexact and all(torch.equal(a, b) for a, b in pairs)


def test_every_rank_of_every_layout_reads_what_it_converted_itself(
    index: CheckpointIndex, cache: WeightCache
) -> None:
    """All in one folder, where each finds its own."""
    for count, layout in enumerate(LAYOUTS, 1):
        assert load(index, layout, cache).origin is Origin.CONVERTED_AND_CACHED
        assert len(cache.files()) == count
    for layout in LAYOUTS:
        found = load(index, layout, cache)
        assert found.origin is Origin.CACHE
        assert same(found, converted(layout))
    assert len(cache.files()) == len(LAYOUTS)


def test_no_two_ranks_or_layouts_share_a_name() -> None:
    whole = [range(2), range(1), ParallelLayout(2, expert_parallel=True, rank=1)]
    shares = [ExpertShare.of(SHAPE, held) for held in (*whole, *LAYOUTS)]
    assert all(one.name != other.name for one, other in combinations(shares, 2))
    parts = [share.part for share in shares[len(whole) :]]
    assert all(one != other for one, other in combinations(parts, 2))
    assert ExpertShare.of(SHAPE, ParallelLayout()) == shares[0]


def test_whole_experts_keep_their_files(index: CheckpointIndex, cache: WeightCache) -> None:
    """Names and tensors, so that nothing that is there is made again."""
    load_experts(index, range(1), CPU, resident_fp8=False, cache=cache)
    (file,) = cache.files()
    assert file.path.name == f"{expert_fingerprint(index)}-v1-experts-0-1-streamed.weights"
    forms = {form.name: form.shape for form in expert_parts.streamed_forms(1, 1)}
    assert forms == {
        "block.0.gate_up.streamed": (1, 90, 15, 6528),
        "block.0.gate_up.bias": (1, 5760),
        "block.0.gate_up.exponents": (1, 5760),
        "block.0.down.streamed": (1, 45, 15, 6528),
        "block.0.down.bias": (1, 2880),
        "block.0.down.exponents": (1, 2880),
        "block.0.inexact_blocks": (1,),
    }
    assert load_experts(index, range(1), CPU, resident_fp8=False, cache=cache).origin is Origin.CACHE


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (ParallelLayout(4, rank=2), ParallelLayout(4, rank=1)),  # the same shapes
        (ParallelLayout(4, rank=0), ParallelLayout(2, rank=0)),
        (ParallelLayout(2, rank=1), range(2)),
        (ParallelLayout(2, rank=1), range(1)),
    ],
    ids=["another rank", "another layout", "whole experts", "one whole expert"],
)
def test_anothers_file_under_a_ranks_name_is_not_taken(
    index: CheckpointIndex,
    cache: WeightCache,
    caplog: pytest.LogCaptureFixture,
    mine: ParallelLayout,
    others: ParallelLayout | range,
) -> None:
    load(index, mine, cache)
    (own,) = cache.files()
    load_experts(index, others, CPU, resident_fp8=False, cache=cache)
    (other,) = (file for file in cache.files() if file.path != own.path)
    shutil.copyfile(other.path, own.path)
    with caplog.at_level(logging.WARNING):
        again = load(index, mine, cache)
    assert f"{own.path}: holds other tensors" in caplog.text
    assert again.origin is Origin.CONVERTED_AND_CACHED
    assert same(again, converted(mine))
    back = load(index, mine, cache)
    assert back.origin is Origin.CACHE
    assert same(back, converted(mine))


def torn(file: CachedFile) -> bytes:
    return file.path.read_bytes()[:-1]


def flipped(file: CachedFile) -> bytes:
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 0x10
    return bytes(data)


def another_format(file: CachedFile) -> bytes:
    version = b'"format_version":"%d"'
    data = file.path.read_bytes()
    assert version % weight_file.FORMAT_VERSION in data
    return data.replace(version % weight_file.FORMAT_VERSION, version % (weight_file.FORMAT_VERSION + 1))


@pytest.mark.parametrize("damage", [torn, flipped, another_format])
def test_a_damaged_file_is_said_and_made_again(
    index: CheckpointIndex,
    cache: WeightCache,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[CachedFile], bytes],
) -> None:
    layout = ParallelLayout(8, rank=3)
    load(index, layout, cache)
    (file,) = cache.files()
    file.path.write_bytes(damage(file))
    with caplog.at_level(logging.WARNING):
        again = load(index, layout, cache)
    assert str(file.path) in caplog.text
    assert again.origin is Origin.CONVERTED_AND_CACHED
    assert same(again, converted(layout))
    assert load(index, layout, cache).origin is Origin.CACHE


def test_other_weights_are_not_mistaken(tmp_path: Path, index: CheckpointIndex, cache: WeightCache) -> None:
    layout = ParallelLayout(8, rank=7)
    first = load(index, layout, cache)
    write_checkpoint(tmp_path / "other", SHAPE, synthesize_parameters(SHAPE, seed=4))
    found = load(open_checkpoint(tmp_path / "other"), layout, cache)
    assert found.origin is Origin.CONVERTED_AND_CACHED
    assert not same(found, first.layers[0])
    assert len(cache.files()) == 2


def test_what_a_rank_does_not_hold_is_where_the_rest_is(
    index: CheckpointIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second bias of all ranks but the first is zeros that nobody reads."""
    device, given = torch.device("meta"), []

    class Reader(ParameterReader):
        def __init__(self, index: CheckpointIndex, device: torch.device) -> None:
            super().__init__(index)

        def read(self, parameter: ParameterSpec, slices: tuple[slice, ...] = (slice(None),)) -> Tensor:
            return super().read(parameter, slices).to(device)

    def convert(*tensors: ExpertMatrix | Tensor, resident_fp8: bool) -> None:
        gate_up, gate_up_bias, down, down_bias = tensors
        for matrix in (gate_up, down):
            assert isinstance(matrix, ExpertMatrix)
            given.extend((matrix.blocks, matrix.scales))
        given.extend((gate_up_bias, down_bias))

    monkeypatch.setattr(load_experts_module, "ParameterReader", Reader)
    monkeypatch.setattr(ConvertedExperts, "from_checkpoint", convert)
    load_experts(index, ParallelLayout(2, rank=1), device, resident_fp8=False, cache=None)
    assert [tensor.device for tensor in given] == [device] * 6


def test_fp8_tiles_are_of_whole_experts(index: CheckpointIndex, cache: WeightCache) -> None:
    layout = ParallelLayout(8, rank=0)
    for origin in (Origin.CONVERTED_AND_CACHED, Origin.CACHE):
        found = load_experts(index, layout, CPU, resident_fp8=True, cache=cache)
        assert (found.origin, found.layers[0].fp8) == (origin, None)
    assert len(cache.files()) == 1
