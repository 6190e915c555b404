"""The packed form of the demo model: kept vocabulary rows only, one compressed file.

Content, after xz: the magic line, the length of a JSON header (8 bytes, little-endian), the header (shape of
the model, kept token ids, and name, dtype and shape of every tensor in order), then the tensors' bytes.
bfloat16 is stored as all high bytes, then all low bytes, since the high ones compress. Names are OpenAI's,
with ``embedding.weight`` [kept rows, H] standing for both ends of the model, and one row each for all others.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from antiphon.demo.network import Attention, Block, Experts, TinyGptOss
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4, quantize_mxfp4
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import CheckpointError

MAGIC = b"antiphon-packed-checkpoint 1\n"
UNSEEN_INPUT, UNSEEN_OUTPUT = "unseen.embedding", "unseen.unembedding"
_DTYPES = {"BF16": torch.bfloat16, "U8": torch.uint8}
Weights = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class PackedModel:
    """A packed file, read."""

    config: GptOssConfig
    token_ids: tuple[int, ...]
    weights: dict[str, Tensor]


def shipped_weights(model: TinyGptOss) -> dict[str, Tensor]:
    """The model as it ships: bfloat16, and MXFP4 experts as uint8; on the CPU, under OpenAI's names."""
    weights = {
        "embedding.weight": _bf16(model.embedding),
        UNSEEN_INPUT: _bf16(model.unseen_input),
        UNSEEN_OUTPUT: _bf16(model.unseen_output),
    }
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, parameter in _named(block, layer):
            if isinstance(parameter, tuple):
                weights[name] = torch.cat([_bf16(part) for part in parameter])
            elif name.endswith("_weight"):
                matrix = quantize_mxfp4(parameter.detach().cpu())
                weights[f"{name}.blocks"], weights[f"{name}.scales"] = matrix.blocks, matrix.scales
            else:
                weights[name] = _bf16(parameter)
    weights["norm.scale"] = _bf16(model.norm)
    return weights


def _bf16(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16)


def _named(block: Block, layer: int) -> Iterator[tuple[str, Tensor | tuple[Tensor, ...]]]:
    """OpenAI's name and our parameter; a tuple is concatenated in the checkpoint, ``_weight`` is MXFP4."""
    attention: Attention = block.attention
    experts: Experts = block.experts
    ours, mlp = f"block.{layer}.attn", f"block.{layer}.mlp"
    yield f"{ours}.sinks", attention.sinks
    yield f"{ours}.norm.scale", attention.norm
    yield f"{ours}.qkv.weight", (attention.q_weight, attention.k_weight, attention.v_weight)
    yield f"{ours}.qkv.bias", (attention.q_bias, attention.k_bias, attention.v_bias)
    yield f"{ours}.out.weight", attention.o_weight
    yield f"{ours}.out.bias", attention.o_bias
    yield f"{mlp}.norm.scale", experts.norm
    yield f"{mlp}.gate.weight", experts.router_weight
    yield f"{mlp}.gate.bias", experts.router_bias
    yield f"{mlp}.mlp1_weight", experts.gate_up
    yield f"{mlp}.mlp1_bias", experts.gate_up_bias
    yield f"{mlp}.mlp2_weight", experts.down
    yield f"{mlp}.mlp2_bias", experts.down_bias


def load_weights(model: TinyGptOss, weights: Weights) -> None:
    """Fill the trainable model with weights as they ship, and freeze it."""
    model.requires_grad_(False)
    copy_weights(model, weights, torch.arange(len(model.embedding)))


def start_from(model: TinyGptOss, packed: PackedModel, token_ids: Sequence[int]) -> int:
    """Fill a model that is to be trained further with a packed one's weights.

    Args:
        model: of the packed model's shape; may keep other vocabulary rows.
        packed: where the weights come from.
        token_ids: the rows that ``model`` keeps; those that ``packed`` has not are drawn from a normal
            distribution with the mean and covariance of those that it has, so that the layers meet nothing
            that is unlike all they were trained with.

    Returns:
        how many rows both keep.

    Raises:
        CheckpointError: the packed model has another shape, or rows that ``model`` has not.
    """
    if packed.config != model.config:
        raise CheckpointError(f"a packed model of another shape: {packed.config}")
    row_of = {token: row for row, token in enumerate(token_ids)}
    lost = [token for token in packed.token_ids if token not in row_of]
    if lost:
        raise CheckpointError(f"{len(lost)} tokens of the packed model are not kept, the first is {lost[0]}")
    known = torch.tensor([row_of[token] for token in packed.token_ids])
    copy_weights(model, packed.weights, known)
    _draw_others(model.embedding, known)
    return len(packed.token_ids)


@torch.no_grad()
def _draw_others(embedding: Tensor, known: Tensor) -> None:
    """Overwrite the rows that are not ``known``, from torch's random numbers."""
    others = torch.ones(len(embedding), dtype=torch.bool)
    others[known] = False
    rows = embedding[~others].float()
    mean = rows.mean(0)
    covariance = (rows - mean).T @ (rows - mean) / len(rows)
    spread = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(len(covariance)))
    drawn = mean + torch.randn(int(others.sum()), rows.shape[1]) @ spread.T
    embedding[others] = drawn.to(embedding)


@torch.no_grad()
def copy_weights(model: TinyGptOss, weights: Weights, rows: Tensor) -> None:
    """Overwrite every parameter; row i of the packed embedding goes to row ``rows[i]``."""
    model.embedding[rows.to(model.embedding.device)] = weights["embedding.weight"].to(model.embedding)
    model.unseen_input.copy_(weights[UNSEEN_INPUT])
    model.unseen_output.copy_(weights[UNSEEN_OUTPUT])
    model.norm.copy_(weights["norm.scale"])
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, parameter in _named(block, layer):
            if isinstance(parameter, tuple):
                parts = torch.split(weights[name], [part.shape[0] for part in parameter])
                for own, part in zip(parameter, parts, strict=True):
                    own.copy_(part)
            elif name.endswith("_weight"):
                matrix = ExpertMatrix(weights[f"{name}.blocks"], weights[f"{name}.scales"])
                parameter.copy_(dequantize_mxfp4(matrix))
            else:
                parameter.copy_(weights[name])


def write_packed(
    weights: Weights,
    config: GptOssConfig,
    token_ids: Sequence[int],
    path: Path,
    preset: int = 9 | lzma.PRESET_EXTREME,
) -> None:
    """Write a packed file; it appears whole or not at all."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header = {
        "config": dataclasses.asdict(config),
        "token_ids": list(token_ids),
        "tensors": [[name, names[t.dtype], list(t.shape)] for name, t in weights.items()],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [MAGIC, len(text).to_bytes(8, "little"), text, *(_to_bytes(t) for t in weights.values())]
    partial = path.with_suffix(".partial")
    partial.write_bytes(lzma.compress(b"".join(parts), check=lzma.CHECK_SHA256, preset=preset))
    os.replace(partial, path)


def read_packed(path: Path) -> PackedModel:
    """Read a packed file.

    Raises:
        CheckpointError: it cannot be read, or is not a packed model; the message names the file.
    """
    try:
        data = memoryview(lzma.decompress(path.read_bytes()))
    except (OSError, lzma.LZMAError) as error:
        raise CheckpointError(f"{path}: cannot be unpacked: {error}") from error
    if data[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path}: not a packed model of this version")
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(data[begin - 8 : begin], "little")
    header = json.loads(bytes(data[begin:end]))
    header["config"]["eos_token_ids"] = tuple(header["config"]["eos_token_ids"])
    weights: dict[str, Tensor] = {}
    for name, kind, shape in header["tensors"]:
        size = int(np.prod(shape)) * _DTYPES[kind].itemsize
        if end + size > len(data):
            raise CheckpointError(f"{path}: ends within {name}")
        weights[name] = _from_bytes(data[end : end + size], kind, shape)
        end += size
    if end != len(data):
        raise CheckpointError(f"{path}: {len(data) - end} bytes too many")
    return PackedModel(GptOssConfig(**header["config"]), tuple(header["token_ids"]), weights)


def _to_bytes(tensor: Tensor) -> bytes:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    if tensor.dtype is torch.bfloat16:
        raw = np.concatenate((raw[1::2], raw[::2]))
    return bytes(raw.tobytes())


def _from_bytes(data: memoryview, kind: str, shape: list[int]) -> Tensor:
    raw = np.frombuffer(data, np.uint8)
    if kind == "BF16":
        high, low = np.split(raw, 2)
        raw = np.stack((low, high), axis=-1).reshape(-1)
    return torch.from_numpy(raw.copy()).view(_DTYPES[kind]).view(shape)
