"""Converted weights on a GPU: written from its memory, read straight back into it, the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import preset
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.weight_cache import expert_parts
from antiphon.model.weight_cache.checksum import checksum
from antiphon.model.weight_cache.load_experts import Origin, load_experts
from antiphon.model.weight_cache.store import WeightCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = replace(
    preset("gpt-oss-20b"),
    num_hidden_layers=2,
    num_experts=8,
    vocab_size=64,
    num_attention_heads=16,
    num_key_value_heads=2,
)
SPLIT = ParallelLayout(2, rank=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "eight-experts"
    write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=3))
    return directory


def test_what_is_read_back_is_what_was_converted(checkpoint: Path, tmp_path: Path) -> None:
    index, cache = open_checkpoint(checkpoint), WeightCache(tmp_path / "cache", 1 << 40)
    device = torch.device("cuda")
    first, second = (
        load_experts(index, range(1, 7), device, resident_fp8=True, cache=cache) for _ in range(2)
    )
    assert (first.origin, second.origin) == (Origin.CONVERTED_AND_CACHED, Origin.CACHE)
    for one, other in zip(first.layers, second.layers, strict=True):
        for parts in (expert_parts.streamed_tensors, expert_parts.fp8_tensors):
            for a, b in zip(parts(one), parts(other), strict=True):
                assert torch.equal(a, b)
        assert one.inexact == other.inexact
        assert other.streamed.gate_up.is_cuda


def test_a_ranks_columns_are_read_back_as_they_were_converted(checkpoint: Path, tmp_path: Path) -> None:
    index, cache = open_checkpoint(checkpoint), WeightCache(tmp_path / "cache", 1 << 40)
    device = torch.device("cuda")
    first, second = (load_experts(index, SPLIT, device, resident_fp8=False, cache=cache) for _ in range(2))
    assert (first.origin, second.origin) == (Origin.CONVERTED_AND_CACHED, Origin.CACHE)
    for one, other in zip(first.layers, second.layers, strict=True):
        pairs = zip(expert_parts.streamed_tensors(one), expert_parts.streamed_tensors(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert one.inexact == other.inexact
        assert other.streamed.gate_up.is_cuda


@pytest.mark.parametrize("held", [range(2), SPLIT], ids=["whole", "split"])
def test_a_gpu_and_a_cpu_convert_to_the_same_bits(checkpoint: Path, held: range | ParallelLayout) -> None:
    index = open_checkpoint(checkpoint)
    on_gpu, on_cpu = (
        load_experts(index, held, torch.device(device), resident_fp8=False, cache=None).layers[0]
        for device in ("cuda", "cpu")
    )
    tensors = zip(expert_parts.streamed_tensors(on_gpu), expert_parts.streamed_tensors(on_cpu), strict=True)
    assert all(torch.equal(a.cpu(), b) for a, b in tensors)


def test_a_checksum_is_the_same_on_both() -> None:
    data = torch.randint(0, 256, ((1 << 20) + 77,), dtype=torch.uint8)
    assert int(checksum(data, "x")) == int(checksum(data.cuda(), "x"))
