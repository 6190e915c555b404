"""What a checkpoint folder holds, cross-checked against its config and its index before any data is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.model.checkpoint.config_json import read_config, read_json_object
from antiphon.model.checkpoint.layout import Layout, ParameterSpec, TensorSpec, parameter_specs
from antiphon.model.checkpoint.safetensors_file import StoredTensor, read_header
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """A folder whose every tensor is accounted for.

    Attributes:
        directory: the folder.
        layout: whose names the files use.
        config: the model's shape.
        parameters: what the model needs, in its order.
        tensors: what the files hold, by name.
    """

    directory: Path
    layout: Layout
    config: GptOssConfig
    parameters: tuple[ParameterSpec, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(directory: Path) -> CheckpointIndex:
    """Read config and headers, and hold each against the other; no tensor data is read.

    Raises:
        CheckpointError: anything missing, surplus, misshapen, of a wrong dtype or truncated. The message
            names the first problem's file and tensor, and how many more there are.
    """
    config, layout = read_config(directory)
    parameters = parameter_specs(config, layout)
    stored = read_tensors(directory)
    problems = [*stored.problems, *check_tensors(directory, parameters, stored)]
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    return CheckpointIndex(directory, layout, config, parameters, stored.tensors)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """What the headers of a folder's files say.

    Attributes:
        files: every safetensors file that was looked at.
        unreadable: those whose header cannot be believed; what they hold is unknown.
        tensors: by name.
        problems: one line each.
    """

    files: tuple[Path, ...]
    unreadable: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    problems: tuple[str, ...]


def read_tensors(directory: Path) -> StoredTensors:
    """Read the headers of the folder's safetensors files.

    With an index json, the files it names are read and must hold exactly what it says; files beside them are
    problems. Without one, every ``*.safetensors`` of the folder is read.
    """
    present = sorted(directory.glob("*.safetensors"))
    problems: list[str] = []
    weight_map: dict[str, str] | None = None
    if (directory / INDEX_NAME).exists():
        try:
            weight_map = _read_weight_map(directory / INDEX_NAME)
        except CheckpointError as error:
            problems.append(str(error))
    if weight_map is None:
        files = present
    else:
        files = sorted({directory / name for name in weight_map.values()})
        problems += [f"{file}: not named in {INDEX_NAME}" for file in present if file not in files]
    if not files:
        problems.append(f"{directory}: no safetensors files")
    unreadable: list[Path] = []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
            unreadable.append(file)
            continue
        for tensor in header:
            if tensor.name in tensors:
                problems.append(f"{file}: {tensor.name}: also in {tensors[tensor.name].file.name}")
            else:
                tensors[tensor.name] = tensor
    if weight_map is not None:
        problems += _check_weight_map(directory, weight_map, tensors, unreadable)
    return StoredTensors(tuple(files), tuple(unreadable), tensors, tuple(problems))


def _read_weight_map(path: Path) -> dict[str, str]:
    entries = read_json_object(path).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{path}: weight_map: missing or not an object of tensor -> file")
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name}: not a safetensors file of this folder: {file!r}")
    return entries


def _check_weight_map(
    directory: Path,
    weight_map: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    unreadable: list[Path],
) -> list[str]:
    index = directory / INDEX_NAME
    problems = []
    for name, file in weight_map.items():
        if name in tensors and tensors[name].file.name != file:
            problems.append(f"{index}: {name}: said to be in {file}, found in {tensors[name].file.name}")
        elif name not in tensors and directory / file not in unreadable:
            problems.append(f"{index}: {name}: said to be in {file}, which does not hold it")
    problems += [
        f"{index}: {name}: not listed, but found in {tensor.file.name}"
        for name, tensor in tensors.items()
        if name not in weight_map
    ]
    return problems


def check_tensors(directory: Path, parameters: tuple[ParameterSpec, ...], stored: StoredTensors) -> list[str]:
    """One line per tensor that is missing, misshapen, of a wrong dtype, or surplus.

    Nothing is called missing while a file is unreadable: it may well be there.
    """
    wanted = {part.name: part for parameter in parameters for part in parameter.parts}
    problems = []
    for name, spec in wanted.items():
        if name in stored.tensors:
            problems += _check_tensor(spec, stored.tensors[name])
        elif stored.files and not stored.unreadable:
            problems.append(f"{directory}: {name}: missing, expected {spec.dtypes[0]} {list(spec.shape)}")
    problems += [
        f"{tensor.file}: {name}: surplus, no such tensor in this model ({tensor.dtype} {list(tensor.shape)})"
        for name, tensor in stored.tensors.items()
        if name not in wanted
    ]
    return problems


def _check_tensor(spec: TensorSpec, tensor: StoredTensor) -> list[str]:
    where = f"{tensor.file}: {spec.name}"
    problems = []
    if tensor.shape != spec.shape:
        problems.append(f"{where}: shape {list(tensor.shape)}, expected {list(spec.shape)}")
    if tensor.dtype not in spec.dtypes:
        problems.append(f"{where}: dtype {tensor.dtype}, expected {' or '.join(spec.dtypes)}")
    return problems
