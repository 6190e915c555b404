"""Random checkpoints: reproducible, written whole or not at all, with sane activations and even routing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from antiphon.model.checkpoint.config_json import read_config
from antiphon.model.checkpoint.in_order import map_in_order
from antiphon.model.checkpoint.inspect import inspect
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.safetensors_file import read_header
from antiphon.model.checkpoint.synthesize import parameters_on_host, synthesize, synthesize_parameters
from antiphon.model.checkpoint.write import stored_tensors, write_checkpoint, write_config
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.transformer import Transformer, TransformerBlock
from antiphon.protocol.errors import CheckpointError, ConfigError

Write = Callable[..., Path]
Forward = Callable[..., Tensor]


def test_same_seed_same_bytes(write_mini: Write) -> None:
    first, again, other = (
        (write_mini(seed=seed, name=name) / "model.safetensors").read_bytes()
        for seed, name in ((1, "first"), (1, "again"), (2, "other"))
    )
    assert first == again
    assert first != other


def test_tiny_is_small_and_complete(tiny_directory: Path) -> None:
    summary = inspect(tiny_directory)
    assert summary.ok
    assert summary.config == preset("tiny")
    assert summary.size_bytes < 220_000_000
    assert sorted(path.name for path in tiny_directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_what_files_would_hold_is_told_without_files(
    write_mini: Write, mini_config: GptOssConfig, tmp_path: Path
) -> None:
    file = write_mini(seed=3, name="written") / "model.safetensors"
    written = load_file(file)
    told = dict(stored_tensors(mini_config, synthesize_parameters(mini_config, 3)))
    assert list(told) == [tensor.name for tensor in read_header(file)]
    for name, tensor in written.items():
        assert torch.equal(told[name], tensor), name
    with pytest.raises(CheckpointError, match="expected embedding"):
        dict(stored_tensors(mini_config, [("norm.scale", torch.zeros(1))]))
    write_config(tmp_path / "alone", mini_config)
    assert read_config(tmp_path / "alone") == read_config(file.parent)
    assert sorted(path.suffix for path in (tmp_path / "alone").iterdir()) == [".json", ".json"]


def test_unknown_shape_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a known model shape"):
        synthesize(tmp_path / "new", like="huge")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path, mini_config: GptOssConfig) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights.safetensors").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write_checkpoint(mine, mini_config, synthesize_parameters(mini_config))
    assert (mine / "weights.safetensors").read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [mine]


def test_an_empty_folder_is_filled(tmp_path: Path, mini_config: GptOssConfig) -> None:
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", mini_config, synthesize_parameters(mini_config))
    assert inspect(tmp_path / "empty").ok


@pytest.mark.parametrize("fault", ["short", "long", "misnamed", "interrupted"])
def test_a_failed_write_leaves_nothing(fault: str, tmp_path: Path, mini_config: GptOssConfig) -> None:
    good = list(synthesize_parameters(mini_config))

    def parameters() -> Iterator[tuple[str, Tensor]]:
        if fault == "misnamed":
            yield ("embedding.wait", good[0][1])
        yield from good[:-1]
        if fault == "interrupted":
            raise KeyboardInterrupt
        if fault == "long":
            yield good[-1]
            yield ("more", torch.zeros(1))

    error: type[BaseException] = KeyboardInterrupt if fault == "interrupted" else CheckpointError
    with pytest.raises(error):
        write_checkpoint(tmp_path / "new", mini_config, parameters())
    assert list(tmp_path.iterdir()) == []


def test_shards_keep_to_their_size(write_mini: Write) -> None:
    limit = 40_000
    directory = write_mini(max_shard_bytes=limit)
    sizes = []
    for file in sorted(directory.glob("*.safetensors")):
        tensors = read_header(file)
        sizes.append(sum(tensor.size_bytes for tensor in tensors))
        assert sizes[-1] <= limit or len(tensors) == 1
    assert len(sizes) > 2


def observe(config: GptOssConfig, tokens: int, forward: Forward) -> tuple[list[float], float, Tensor]:
    """Rms of the residual stream after each layer, std of the logits, tokens per expert [layers, E]."""
    model = Transformer(config, torch.float32)
    fill(model, synthesize_parameters(config, seed=0))
    rms: list[float] = []
    loads: list[Tensor] = []
    for block in model.block:
        block.register_forward_hook(lambda _, __, out: rms.append(out.pow(2).mean().sqrt().item()))

        def count(_: object, args: tuple[Tensor], block: TransformerBlock = block) -> None:
            ids, _weights = block.mlp.route(block.mlp.norm(args[0]))
            loads.append(ids.flatten().bincount(minlength=config.num_experts))

        block.mlp.register_forward_pre_hook(count)
    token_ids = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    logits = model.logits(forward(model, token_ids))
    return rms, logits.std().item(), torch.stack(loads).float()


@pytest.mark.parametrize("like", ["tiny", "gpt-oss-20b", "gpt-oss-120b"])
def test_activations_and_routing_are_sane_through_all_layers(like: str, forward: Forward) -> None:
    """At the real depth and number of experts; narrower, for speed, which makes routing less even."""
    config = preset(like)
    if like != "tiny":
        config = replace(
            config,
            hidden_size=256,
            intermediate_size=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=5000,
        )
    rms, logit_std, loads = observe(config, 600, forward)
    assert len(rms) == config.num_hidden_layers
    assert min(rms) > 1
    assert max(rms) < 20
    assert 2 < logit_std < 4
    assert loads.min() > 0
    # Chance alone spreads by 1 / sqrt(mean); what comes on top is the router's preference.
    relative_variance = (loads.std(1) / loads.mean(1)).square() - 1 / loads.mean(1)
    assert relative_variance.mean() < 0.2**2
    assert relative_variance.max() < 0.35**2


def test_experts_keep_to_a_narrow_range_of_scales(mini_config: GptOssConfig) -> None:
    """Lossless in FP8 with 128 x 128 blocks needs block exponents within 14 of each other."""
    for name, tensor in synthesize_parameters(mini_config):
        if name.endswith(".scales"):
            assert len(tensor.unique()) == 4
            assert tensor.max() - tensor.min() == 3


def test_layouts_hold_the_same_values(write_mini: Write) -> None:
    ours = write_mini(layout=Layout.OPENAI, name="openai")
    theirs = write_mini(layout=Layout.HUGGING_FACE, name="huggingface")
    assert inspect(ours).bytes_by_kind == inspect(theirs).bytes_by_kind
    assert inspect(ours).tensors < inspect(theirs).tensors


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int, mini_config: GptOssConfig) -> None:
    alone = list(synthesize_parameters(mini_config, 5))
    together = list(parameters_on_host(mini_config, 5, threads=threads))
    assert [name for name, _ in together] == [name for name, _ in alone]
    for (name, a), (_, b) in zip(alone, together, strict=True):
        assert torch.equal(a, b), name


def test_results_come_in_order_and_not_too_far_ahead() -> None:
    begun: list[int] = []
    slow_first = threading.Event()

    def square(item: int) -> int:
        begun.append(item)
        if item == 0:
            assert slow_first.wait(30)
        return item * item

    def items() -> Iterator[int]:
        for item in range(8):
            yield item
            if item == 2:
                slow_first.set()  # three were taken without waiting for the first

    results = map_in_order(square, items(), threads=2, ahead=3)
    assert begun == []
    assert next(results) == 0
    assert max(begun) <= 2
    assert list(results) == [item * item for item in range(1, 8)]


def test_a_failure_comes_at_its_place_and_ends_the_rest() -> None:
    begun: list[int] = []

    def fail_at_two(item: int) -> int:
        begun.append(item)
        if item == 2:
            raise OSError("disk")
        return item

    results = map_in_order(fail_at_two, range(1000), threads=2, ahead=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(results)
    assert len(begun) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("map-in-order")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_threads_change_nothing_that_a_gpu_draws(mini_config: GptOssConfig) -> None:
    alone = dict(synthesize_parameters(mini_config, 5, "cuda"))
    for name, tensor in parameters_on_host(mini_config, 5, "cuda", threads=4):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, alone[name].cpu()), name
