"""Who holds what: every byte of a checkpoint on exactly one rank, or on all of them, and nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from antiphon.model.checkpoint import read as read_module
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.layout import Layout, TensorKind, parameter_specs
from antiphon.model.checkpoint.load import load_model, read_parameters
from antiphon.model.checkpoint.safetensors_file import DTYPE_BYTES
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.parallel.communicator import SingleRank
from antiphon.model.parallel.layout import ParallelLayout, RankShape
from antiphon.model.parallel.load import load_parallel_model, read_shard
from antiphon.model.parallel.sharding import ParameterCuts, Spread, shard_parameters
from antiphon.model.parallel.sizes import rank_bytes
from antiphon.protocol.errors import CheckpointError, ConfigError

LAYOUTS = [(1, False), (2, False), (4, False), (1, True), (2, True), (4, True)]
layouts = pytest.mark.parametrize(("ranks", "experts"), LAYOUTS)


@pytest.fixture(scope="module", params=list(Layout))
def index(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, spread_config: GptOssConfig
) -> CheckpointIndex:
    directory: Path = tmp_path_factory.mktemp("spread") / "checkpoint"
    write_checkpoint(directory, spread_config, synthesize_parameters(spread_config), request.param, 200_000)
    return open_checkpoint(directory)


class Painted:
    """Stands for a safetensors file: counts how often each element of each tensor is read."""

    counts: defaultdict[str, dict[int, Tensor]]
    rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = safe_open(*args, **kwargs)

    def __enter__(self) -> Painted:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def get_slice(self, name: str) -> Painted._Slice:
        return Painted._Slice(name, self._file.get_slice(name))

    class _Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self._name, self._inner = name, inner

        def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
            counts = Painted.counts[self._name].setdefault(
                Painted.rank, torch.zeros(self._inner.get_shape(), dtype=torch.int32)
            )
            counts[slices] += 1
            tensor: Tensor = self._inner[slices]
            return tensor


@layouts
def test_every_byte_is_read_exactly_once_over_all_ranks(
    ranks: int, experts: bool, index: CheckpointIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    Painted.counts = defaultdict(dict)
    monkeypatch.setattr(read_module, "safe_open", Painted)
    for rank in range(ranks):
        Painted.rank = rank
        for _ in read_shard(index, ParallelLayout(ranks, experts, rank)):
            pass

    once = replicated = 0
    for parameter in index.parameters:
        everywhere = parameter.kind in (TensorKind.NORM, TensorKind.ROUTER)
        for part in parameter.parts:
            read = Painted.counts[part.name]
            total = torch.stack(list(read.values())).sum(0)
            size = index.tensors[part.name].size_bytes
            if everywhere:
                assert sorted(read) == list(range(ranks)), part.name
                assert bool((total == ranks).all()), part.name
                replicated += size
            else:
                assert bool((total == 1).all()), part.name
                once += size
    assert once + replicated == sum(tensor.size_bytes for tensor in index.tensors.values())
    assert once > 50 * replicated or ranks == 1


@layouts
def test_parts_read_from_files_equal_parts_of_whole_parameters(
    ranks: int, experts: bool, index: CheckpointIndex
) -> None:
    for rank in range(ranks):
        layout = ParallelLayout(ranks, experts, rank)
        expected = dict(shard_parameters(index.config, layout, read_parameters(index)))
        parts = dict(read_shard(index, layout))
        assert list(parts) == [parameter.name for parameter in index.parameters]
        for name, part in parts.items():
            assert part.dtype == expected[name].dtype, name
            assert torch.equal(part, expected[name]), name


def test_one_rank_holds_what_a_model_that_is_not_split_holds(index: CheckpointIndex) -> None:
    model = load_parallel_model(index.directory, ParallelLayout(), SingleRank(), torch.float32)
    whole = dict(load_model(index.directory, torch.float32).named_parameters())
    assert set(whole) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_a_worker_that_never_samples_reads_no_output_projection(index: CheckpointIndex) -> None:
    names = [n for n, _ in read_shard(index, ParallelLayout(2), frozenset({TensorKind.UNEMBEDDING}))]
    assert "unembedding.weight" not in names
    assert len(names) == len(index.parameters) - 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_scale_is_found_by_the_rank_that_holds_it(
    rank: int, tmp_path: Path, spread_config: GptOssConfig
) -> None:
    def damaged() -> Any:
        for name, tensor in synthesize_parameters(spread_config):
            if name == "block.1.mlp.mlp1_weight.scales":
                tensor[5, 3, 1] = 255
            yield name, tensor

    write_checkpoint(tmp_path / "bad", spread_config, damaged(), Layout.OPENAI, 10**9)
    read = read_shard(open_checkpoint(tmp_path / "bad"), ParallelLayout(2, True, rank))
    if rank == 0:
        assert len(list(read)) == len(parameter_specs(spread_config, Layout.OPENAI))
        return
    with pytest.raises(CheckpointError, match=r"block\.1\.mlp\.mlp1_weight\.scales.*255"):
        list(read)


@pytest.mark.parametrize("like", ["gpt-oss-20b", "gpt-oss-120b"])
def test_the_bytes_of_a_rank_are_known_before_it_loads(like: str) -> None:
    config = preset(like)
    whole = rank_bytes(config, ParallelLayout())
    total = sum(whole.values())
    assert total / 1e9 == pytest.approx({"gpt-oss-20b": 13.761, "gpt-oss-120b": 65.249}[like], abs=1e-3)
    assert sum(rank_bytes(config, ParallelLayout(), False).values()) == total - 2 * 201_088 * 2880
    matrices = (TensorKind.EXPERT_MATRIX, TensorKind.EXPERT_SCALE)
    for ranks in (2, 4, 8):
        dealt = rank_bytes(config, ParallelLayout(ranks, True, ranks - 1))
        split = rank_bytes(config, ParallelLayout(ranks, False, ranks - 1))
        for kind in (TensorKind.NORM, TensorKind.ROUTER):
            assert dealt[kind] == split[kind] == whole[kind]
        for kind in matrices:
            assert dealt[kind] * ranks == whole[kind]
            assert split[kind] / dealt[kind] == pytest.approx(3072 / 2880)  # 6.7 % of zeros


def test_the_bytes_foreseen_are_the_bytes_read(index: CheckpointIndex) -> None:
    for layout in (ParallelLayout(2, False, 1), ParallelLayout(4, True, 2)):
        read = sum(part.numel() * part.element_size() for _, part in read_shard(index, layout))
        assert sum(rank_bytes(index.config, layout).values()) == read


def tensor_bytes(kind: TensorKind, shape: tuple[int, ...]) -> int:
    matrix = kind in (TensorKind.EXPERT_MATRIX, TensorKind.EXPERT_SCALE)
    return math.prod(shape) * DTYPE_BYTES["U8" if matrix else "BF16"]


@pytest.mark.parametrize("experts", [False, True], ids=["TP", "EP"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("like", ["gpt-oss-20b", "gpt-oss-120b"])
def test_the_published_sizes_add_up(like: str, ranks: int, experts: bool) -> None:
    """Over all ranks: the checkpoint once, what is replicated as often as there are ranks."""
    config = preset(like)
    specs = parameter_specs(config, Layout.OPENAI)
    cuts = [ParameterCuts(config, ParallelLayout(ranks, experts, rank)) for rank in range(ranks)]
    for spec in specs:
        of_ranks = [cut.of(spec.name, spec.shape) for cut in cuts]
        read = [index for cut in of_ranks for part in cut.ranges for index in part]
        axis = of_ranks[0].axis
        assert {cut.axis for cut in of_ranks} == {axis}
        times = ranks if of_ranks[0].spread is Spread.REPLICATED else 1
        assert sorted(read) == sorted(list(range(spec.shape[axis])) * times), spec.name
        assert len({cut.shape(spec.shape) for cut in of_ranks}) == 1  # every rank runs the same shapes
    total = sum(tensor_bytes(spec.kind, spec.shape) for spec in specs)
    assert total / 1e9 == pytest.approx({"gpt-oss-20b": 13.761, "gpt-oss-120b": 65.249}[like], abs=1e-3)


@pytest.mark.parametrize(
    ("ranks", "padded", "held"), [(1, 2880, [2880]), (2, 1536, [1440] * 2), (4, 768, [704, 736] * 2)]
)
def test_expert_columns_are_cut_between_blocks_and_padded_to_tiles(
    ranks: int, padded: int, held: list[int]
) -> None:
    shapes = [ParallelLayout(ranks, rank=rank).shape(preset("gpt-oss-20b")) for rank in range(ranks)]
    assert [len(shape.inner) for shape in shapes] == held
    assert {shape.inner_padded for shape in shapes} == {padded}
    assert all(shape.inner.start % 32 == 0 for shape in shapes)


def test_eight_ranks_pad_to_384() -> None:
    shapes = [ParallelLayout(8, rank=rank).shape(preset("gpt-oss-20b")) for rank in range(8)]
    assert {shape.inner_padded for shape in shapes} == {384}
    assert sum(len(shape.inner) for shape in shapes) == 2880


def test_heads_go_with_the_kv_head_that_they_read() -> None:
    config = preset("gpt-oss-120b")
    group = config.num_attention_heads // config.num_key_value_heads
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            shape = ParallelLayout(ranks, True, rank).shape(config)
            assert {head // group for head in shape.heads} == set(shape.kv_heads)
            assert len(shape.experts) == 128 // ranks


def test_one_rank_is_whole_however_its_experts_are_spread(spread_config: GptOssConfig) -> None:
    for experts in (False, True):
        assert ParallelLayout(1, experts).shape(spread_config) == RankShape.whole(spread_config)


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        ({}, {"tensor_parallel": 3}, r"tensor_parallel 3 does not divide num_attention_heads 64"),
        ({}, {"tensor_parallel": 16}, r"tensor_parallel 16 does not divide num_key_value_heads 8"),
        ({"vocab_size": 1001}, {"tensor_parallel": 2}, r"2 does not divide vocab_size 1001"),
        (
            {"num_experts": 6},
            {"tensor_parallel": 4, "expert_parallel": True},
            r"expert_parallel over 4 ranks does not divide num_experts 6",
        ),
        (
            {"intermediate_size": 96},
            {"tensor_parallel": 4},
            r"tensor_parallel 4 exceeds the 3 MXFP4 blocks of 32 columns in intermediate_size 96",
        ),
    ],
)
def test_uneven_sizes_are_refused_with_both_values(
    change: dict[str, int], layout: dict[str, Any], message: str
) -> None:
    config = replace(preset("gpt-oss-20b"), **change)
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**layout).shape(config)


def test_experts_need_no_padding_when_they_are_dealt_out_whole() -> None:
    config = replace(preset("gpt-oss-20b"), intermediate_size=96)
    assert ParallelLayout(4, True, 3).shape(config).inner_padded == 96


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_is_not_there_is_refused(ranks: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=str(rank if ranks else ranks)):
        ParallelLayout(ranks, rank=rank)


def test_a_parameter_without_a_rule_is_an_error(spread_config: GptOssConfig) -> None:
    with pytest.raises(CheckpointError, match=r"block\.0\.attn\.extra: no rule"):
        ParameterCuts(spread_config, ParallelLayout(2)).of("block.0.attn.extra", (4,))


def test_layouts_have_the_names_people_use() -> None:
    assert ParallelLayout(4).name == "TP4"
    assert ParallelLayout(4, True).name == "EP4 TP4"
