"""Writing checkpoints: sharding, index, config, and the files themselves, streamed tensor by tensor."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon.model.checkpoint.config_json import CONFIG_NAME, config_tree
from antiphon.model.checkpoint.index import INDEX_NAME
from antiphon.model.checkpoint.layout import Layout, ParameterSpec, TensorSpec, parameter_specs
from antiphon.model.checkpoint.safetensors_file import DTYPE_BYTES, encode_header
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import CheckpointError

MAX_SHARD_BYTES = 4_850_000_000
"""Cuts gpt-oss-20b into three files, as it is published."""
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its name and the tensors in it, in order."""

    file: str
    tensors: tuple[TensorSpec, ...]


def write_checkpoint(
    directory: Path,
    config: GptOssConfig,
    parameters: Iterable[tuple[str, Tensor]],
    layout: Layout = Layout.HUGGING_FACE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a whole checkpoint; the folder appears when it is complete, or not at all.

    Args:
        directory: must be absent or empty.
        config: the model's shape.
        parameters: (OpenAI's name, tensor) in the order of ``parameter_specs``; experts as uint8 ``blocks``
            and ``scales``. Consumed one at a time, so memory stays at one parameter.
        layout: whose names and files to write.
        max_shard_bytes: a file is closed before it would grow beyond this.

    Raises:
        CheckpointError: the folder is not empty, or ``parameters`` are not those of the config.
        OSError: the disk is full or not writable.
    """
    specs = parameter_specs(config, layout)
    shards = plan_shards(specs, layout, max_shard_bytes)
    parts = _split_parameters(specs, parameters)
    with _appearing(directory) as folder:
        for shard in shards:
            header, _ = _header(shard)
            with (folder / shard.file).open("wb") as file:
                file.write(header)
                for spec in shard.tensors:
                    tensor = next(parts).to(_DTYPES[spec.dtypes[0]]).cpu().contiguous()
                    file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        if next(parts, None) is not None:
            raise CheckpointError(f"{directory}: more parameters given than the model has")
        _write_metadata(folder, config, layout, shards)


def stored_tensors(
    config: GptOssConfig, parameters: Iterable[tuple[str, Tensor]], layout: Layout = Layout.HUGGING_FACE
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that ``write_checkpoint`` would write, in order, under the names of the files.

    Args:
        parameters: as there; consumed one at a time. Tensors stay on their device.

    Raises:
        CheckpointError: ``parameters`` are not those of the config.
    """
    specs = parameter_specs(config, layout)
    parts = _split_parameters(specs, parameters)
    for spec in (part for each in specs for part in each.parts):
        yield spec.name, next(parts).to(_DTYPES[spec.dtypes[0]])


def write_config(directory: Path, config: GptOssConfig) -> None:
    """Write Hugging Face's config files alone, for whoever needs a model's shape without its weights.

    Raises:
        OSError: the folder cannot be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_metadata(directory, config, Layout.HUGGING_FACE, ())


def write_sparse_checkpoint(
    directory: Path,
    config: GptOssConfig,
    layout: Layout = Layout.HUGGING_FACE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint whose data are holes: every name, shape, dtype and size, next to no disk space.

    Reads as zeros. For exercising whatever looks at headers and sizes at full scale.

    Raises:
        CheckpointError: the folder is not empty.
    """
    shards = plan_shards(parameter_specs(config, layout), layout, max_shard_bytes)
    with _appearing(directory) as folder:
        for shard in shards:
            header, size = _header(shard)
            with (folder / shard.file).open("wb") as file:
                file.write(header)
                file.truncate(size)
        _write_metadata(folder, config, layout, shards)


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """A folder beside ``directory`` that takes its place on success and is removed on failure."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists and is not an empty folder; nothing was written")
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        folder.chmod(0o755)  # mkdtemp's own mode would keep other users out
        yield folder
        try:
            folder.rename(directory)
        except OSError as error:
            raise CheckpointError(f"{directory}: came to be while it was written; left as it is") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plan_shards(specs: tuple[ParameterSpec, ...], layout: Layout, max_shard_bytes: int) -> tuple[Shard, ...]:
    """Cut the tensors, in their order, into files of at most ``max_shard_bytes`` (or of one tensor)."""
    groups: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        for part in spec.parts:
            size = _size_bytes(part)
            if size > room and groups[-1]:
                groups.append([])
                room = max_shard_bytes
            groups[-1].append(part)
            room -= size
    return tuple(Shard(_file_name(layout, i, len(groups)), tuple(g)) for i, g in enumerate(groups))


def _file_name(layout: Layout, index: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    if layout is Layout.OPENAI:  # counted from 1
        return f"model--{index + 1:05d}-of-{count:05d}.safetensors"
    return f"model-{index:05d}-of-{count - 1:05d}.safetensors"


def _size_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtypes[0]]


def _header(shard: Shard) -> tuple[bytes, int]:
    return encode_header((spec.name, spec.dtypes[0], spec.shape) for spec in shard.tensors)


def _split_parameters(
    specs: tuple[ParameterSpec, ...], parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[Tensor]:
    """The tensors of the files, in order, out of the parameters they make up."""
    given = iter(parameters)
    for spec in specs:
        name, tensor = next(given, ("nothing", torch.empty(0)))
        if name != spec.name or tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"expected {spec.name} {list(spec.shape)}, was given {name} {list(tensor.shape)}"
            )
        yield from torch.split(tensor, [part.shape[0] for part in spec.parts])
    for _, tensor in given:
        yield tensor


def _write_metadata(directory: Path, config: GptOssConfig, layout: Layout, shards: tuple[Shard, ...]) -> None:
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_size_bytes(spec) for s in shards for spec in s.tensors)},
            "weight_map": {spec.name: s.file for s in shards for spec in s.tensors},
        }
        _write_json(directory / INDEX_NAME, index)
    if layout is Layout.HUGGING_FACE:
        generation = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
        _write_json(directory / "generation_config.json", generation)
    _write_json(directory / CONFIG_NAME, config_tree(config, layout))


def _write_json(path: Path, tree: dict[str, object]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n")
