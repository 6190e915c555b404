"""Random checkpoints with activations of a sane size, on disk or straight into a device's memory.

How the sizes are kept sane: embeddings and norms have unit rms; every projection has the gain below over the
square root of its inputs; so each layer adds an rms of about 0.9 to a residual stream that starts at 1, and
36 layers end near 6. Logits have a standard deviation of about 3, far enough apart for greedy decoding to be
stable and close enough for sampling to mean something. Gates and ups reach their clamps now and then, and
sinks take a visible share of every softmax, so that leaving either out is seen.

Routing is near uniform, in three ways. Little adds the same vector to every token, which a router would see
as a preference: the biases that reach the residual stream are small; attention is sharp enough that tokens do
not all read the same average, and adds less than the experts do, so that what it does average is not
amplified from layer to layer; and the up half's bias is centred on -1, which takes the mean out of
gate * sigmoid(gate) * (up + 1). Router rows have equal length, since a longer row wins more often. And the
router's own bias is small. Tokens drawn uniformly from the vocabulary then load experts almost evenly;
repeated tokens do not.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.reference import FP4_VALUES
from antiphon.model.checkpoint.in_order import map_in_order
from antiphon.model.checkpoint.layout import Layout, ParameterSpec, TensorKind, parameter_specs
from antiphon.model.checkpoint.write import MAX_SHARD_BYTES, write_checkpoint
from antiphon.model.config import GptOssConfig, preset

_BIAS_STD = 0.02
_GATE_UP_BIAS_STD = 0.1
_NORM_STD = 0.1
_SINK_MEAN, _SINK_STD = 4.0, 1.0
_QUERY_GAIN = 1.5
_OUT_GAIN = 0.7
_LOGIT_STD = 3.0
_GATE_UP_GAIN = 2.0
_DOWN_GAIN = 0.6
_FP4_RMS = math.sqrt(sum(value * value for value in FP4_VALUES) / len(FP4_VALUES))
_AHEAD = 32  # parameters; two layers, hence four tensors of blocks, which take nearly all the time
_SPREAD_RMS = math.sqrt((0.25 + 1.0 + 4.0) / 3)  # of 2 to the power of -1, 0 or +1, equally often


def synthesize(
    directory: Path,
    like: str = "tiny",
    seed: int = 0,
    layout: Layout = Layout.HUGGING_FACE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    device: torch.device | str = "cpu",
) -> GptOssConfig:
    """Write a random checkpoint of a known shape; the same seed gives the same values in either layout.

    Holds about two layers and the embedding in memory: 2 GB for gpt-oss-20b, 5 GB for gpt-oss-120b.

    Args:
        directory: must be absent or empty; appears when it is complete.
        like: ``tiny`` (about 110 MB), ``gpt-oss-20b`` (13.8 GB) or ``gpt-oss-120b`` (65.2 GB).
        seed: of all randomness.
        layout: whose names and files to write.
        max_shard_bytes: largest file.
        device: draws the numbers; CPU and CUDA draw different ones.

    Returns:
        the shape that was written.

    Raises:
        ConfigError: no shape of that name.
        CheckpointError: the folder is not empty.
    """
    config = preset(like)
    write_checkpoint(directory, config, parameters_on_host(config, seed, device), layout, max_shard_bytes)
    return config


def parameters_on_host(
    config: GptOssConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    threads: int = min(4, os.cpu_count() or 1),
) -> Iterator[tuple[str, Tensor]]:
    """What ``synthesize_parameters`` makes, in the host's memory, drawn and fetched while others are used.

    Args:
        threads: that draw; a parameter is drawn by one of them, whose number does not change it.

    Yields:
        as there.
    """

    def draw(spec: ParameterSpec) -> tuple[str, Tensor]:
        return spec.name, _parameter(spec, config, seed, torch.device(device)).cpu()

    yield from map_in_order(draw, parameter_specs(config, Layout.OPENAI), threads, _AHEAD, "synthesize")


def synthesize_parameters(
    config: GptOssConfig, seed: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Random parameters made on ``device``, one at a time, in the order of the model.

    Each depends on (seed, its name, the device's type) only. CPU and CUDA draw different numbers.

    Yields:
        (OpenAI's name, tensor): bfloat16, and uint8 for the ``blocks`` and ``scales`` of MXFP4 experts.
    """
    for spec in parameter_specs(config, Layout.OPENAI):
        yield spec.name, _parameter(spec, config, seed, torch.device(device))


def _parameter(spec: ParameterSpec, config: GptOssConfig, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device)
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
    generator.manual_seed(int.from_bytes(digest, "little"))
    return _draw(spec, config, generator)


def _draw(spec: ParameterSpec, config: GptOssConfig, generator: torch.Generator) -> Tensor:
    if spec.kind is TensorKind.EXPERT_MATRIX:
        return torch.randint(
            0, 256, spec.shape, dtype=torch.uint8, device=generator.device, generator=generator
        )
    if spec.kind is TensorKind.EXPERT_SCALE:
        inputs, gain = (
            (config.hidden_size, _GATE_UP_GAIN)
            if "mlp1" in spec.name
            else (config.intermediate_size, _DOWN_GAIN)
        )
        return _draw_scales(spec.shape, gain / math.sqrt(inputs), generator)
    mean, std = _moments(spec, config)
    values = torch.empty(spec.shape, dtype=torch.bfloat16, device=generator.device)
    values.normal_(mean, std, generator=generator)
    if spec.name.endswith(".mlp1_bias"):
        values[:, 1::2] -= 1.0
    elif spec.name.endswith(".gate.weight"):
        values = torch.nn.functional.normalize(values.float(), dim=-1).to(values.dtype)
    elif spec.name.endswith(".qkv.weight"):
        values[: config.query_width] *= _QUERY_GAIN
    return values


def _draw_scales(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    """Block scales [..., blocks] uint8, four different ones, that give random FP4 codes this deviation."""
    target = math.log2(std / (_FP4_RMS * _SPREAD_RMS))
    low = math.floor(target)
    share_above = (
        math.pow(4.0, target - low) - 1
    ) / 3  # mixes 4^low and 4^(low + 1) to a mean square of 4^target
    above = torch.rand(shape, device=generator.device, generator=generator) < share_above
    spread = torch.randint(-1, 2, shape, dtype=torch.int8, device=generator.device, generator=generator)
    return (spread + (127 + low) + above).to(torch.uint8)


def _moments(spec: ParameterSpec, config: GptOssConfig) -> tuple[float, float]:
    """Mean and standard deviation of a parameter that is not MXFP4."""
    if spec.kind is TensorKind.NORM:
        return 1.0, _NORM_STD
    if spec.kind is TensorKind.EMBEDDING:
        return 0.0, 1.0
    if spec.kind is TensorKind.UNEMBEDDING:
        return 0.0, _LOGIT_STD / math.sqrt(config.hidden_size)
    if spec.name.endswith(".sinks"):
        return _SINK_MEAN, _SINK_STD
    if spec.name.endswith("bias"):
        return 0.0, _GATE_UP_BIAS_STD if spec.name.endswith(".mlp1_bias") else _BIAS_STD
    gain = _OUT_GAIN if spec.name.endswith(".out.weight") else 1.0
    return 0.0, gain / math.sqrt(spec.shape[-1])
