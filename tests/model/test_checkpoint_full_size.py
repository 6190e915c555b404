"""Full-size checkpoints as sparse files: every name, shape and dtype of the published ones, no data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.model.checkpoint.index import INDEX_NAME, open_checkpoint
from antiphon.model.checkpoint.inspect import inspect, render
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.write import write_sparse_checkpoint
from antiphon.model.config import preset
from antiphon.protocol.errors import CheckpointError

PUBLISHED = {
    # parameters, bytes of data, tensors and files in Hugging Face's layout
    "gpt-oss-20b": (20_914_757_184, 13_761_264_768, 459, 3),
    "gpt-oss-120b": (116_829_156_672, 65_248_815_744, 687, 15),
}


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_full_size_headers_are_accepted(name: str, layout: Layout, tmp_path: Path) -> None:
    directory = tmp_path / "full"
    write_sparse_checkpoint(directory, preset(name), layout)
    assert disk_bytes(directory) < 4_000_000
    index = open_checkpoint(directory)
    assert index.config == preset(name)
    summary = inspect(directory)
    assert summary.ok
    parameters, size_bytes, tensors, files = PUBLISHED[name]
    assert summary.parameters == parameters
    assert summary.size_bytes == size_bytes == sum(summary.bytes_by_kind.values())
    assert len(summary.files) == files
    if layout is Layout.HUGGING_FACE:
        assert summary.tensors == tensors
    metadata = json.loads((directory / INDEX_NAME).read_text())["metadata"]
    assert metadata["total_size"] == size_bytes


@pytest.mark.parametrize(
    ("layout", "name", "shape", "dtype"),
    [
        (Layout.HUGGING_FACE, "model.layers.35.mlp.experts.gate_up_proj_blocks", (128, 5760, 90, 16), "U8"),
        (Layout.HUGGING_FACE, "model.layers.0.mlp.experts.down_proj_scales", (128, 2880, 90), "U8"),
        (Layout.HUGGING_FACE, "model.layers.7.self_attn.k_proj.weight", (512, 2880), "BF16"),
        (Layout.HUGGING_FACE, "model.layers.7.self_attn.q_proj.bias", (4096,), "BF16"),
        (Layout.HUGGING_FACE, "lm_head.weight", (201_088, 2880), "BF16"),
        (Layout.OPENAI, "block.35.mlp.mlp1_weight.blocks", (128, 5760, 90, 16), "U8"),
        (Layout.OPENAI, "block.0.mlp.mlp2_bias", (128, 2880), "BF16"),
        (Layout.OPENAI, "block.7.attn.qkv.weight", (5120, 2880), "BF16"),
        (Layout.OPENAI, "block.7.attn.sinks", (64,), "BF16"),
        (Layout.OPENAI, "norm.scale", (2880,), "BF16"),
    ],
)
def test_published_names_and_shapes(
    layout: Layout, name: str, shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    write_sparse_checkpoint(tmp_path / "full", preset("gpt-oss-120b"), layout)
    tensor = open_checkpoint(tmp_path / "full").tensors[name]
    assert (tensor.shape, tensor.dtype) == (shape, dtype)


def test_a_full_size_shard_that_is_cut_is_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "full"
    write_sparse_checkpoint(directory, preset("gpt-oss-120b"))
    shard = directory / "model-00007-of-00014.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match=r"model-00007-of-00014\.safetensors: \S+: truncated"):
        open_checkpoint(directory)
    summary = inspect(directory)
    assert not summary.ok
    assert len(summary.problems) == 1


def test_a_20b_config_over_120b_weights_is_noticed(tmp_path: Path) -> None:
    for name in PUBLISHED:
        write_sparse_checkpoint(tmp_path / name, preset(name))
    config = (tmp_path / "gpt-oss-20b" / "config.json").read_text()
    (tmp_path / "gpt-oss-120b" / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"shape \[128, 2880\], expected \[32, 2880\]"):
        open_checkpoint(tmp_path / "gpt-oss-120b")


def test_summary_as_text(tmp_path: Path) -> None:
    directory = tmp_path / "full"
    write_sparse_checkpoint(directory, preset("gpt-oss-20b"))
    text = render(inspect(directory))
    for part in ("huggingface", "24 (12 sliding over 128 tokens, 12 full)", "20,914,757,184", "13.76 GB"):
        assert part in text
    assert text.endswith("problems    none")
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert "problem     " in render(inspect(directory))
    assert "model-00001-of-00002.safetensors: cannot be read" in render(inspect(directory))
