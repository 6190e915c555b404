"""What is in a checkpoint folder: told from configs and headers alone, broken ones included."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from antiphon.model.checkpoint.config_json import read_config
from antiphon.model.checkpoint.index import StoredTensors, check_tensors, read_tensors
from antiphon.model.checkpoint.layout import Layout, ParameterSpec, TensorKind, parameter_specs
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import CheckpointError

_FP4_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint folder at a glance.

    Attributes:
        directory: the folder.
        layout, config: None if config.json cannot be used (the reason is a problem).
        files: (name, bytes) of every safetensors file that is there.
        tensors: tensors in the files.
        parameters: scalars in the files, two per byte of expert blocks; block scales are not counted.
        bytes_by_kind: bytes of data by what they are for; empty without a config.
        bytes_by_dtype: bytes of data by safetensors dtype code.
        problems: everything that loading would refuse, one line each.
    """

    directory: Path
    layout: Layout | None
    config: GptOssConfig | None
    files: tuple[tuple[str, int], ...]
    tensors: int
    parameters: int
    bytes_by_kind: dict[str, int]
    bytes_by_dtype: dict[str, int]
    problems: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(self.bytes_by_dtype.values())

    @property
    def ok(self) -> bool:
        """Whether loading would accept the folder's headers."""
        return not self.problems


def inspect(directory: Path) -> CheckpointSummary:
    """Summarise a folder from its JSON files and safetensors headers; tensor data are not read.

    Raises:
        CheckpointError: there is no such folder. What is wrong inside it is in ``problems``.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder")
    problems: list[str] = []
    config: GptOssConfig | None = None
    layout: Layout | None = None
    try:
        config, layout = read_config(directory)
    except CheckpointError as error:
        problems.append(str(error))
    stored = read_tensors(directory)
    problems += stored.problems
    specs: tuple[ParameterSpec, ...] = ()
    if config is not None and layout is not None:
        specs = parameter_specs(config, layout)
        problems += check_tensors(directory, specs, stored)
    by_dtype: Counter[str] = Counter()
    for tensor in stored.tensors.values():
        by_dtype[tensor.dtype] += tensor.size_bytes
    return CheckpointSummary(
        directory=directory,
        layout=layout,
        config=config,
        files=tuple((file.name, file.stat().st_size) for file in stored.files if file.exists()),
        tensors=len(stored.tensors),
        parameters=_count_parameters(specs, stored),
        bytes_by_kind=_bytes_by_kind(specs, stored),
        bytes_by_dtype=dict(by_dtype),
        problems=tuple(problems),
    )


def _kinds(specs: tuple[ParameterSpec, ...]) -> dict[str, TensorKind]:
    return {part.name: spec.kind for spec in specs for part in spec.parts}


def _bytes_by_kind(specs: tuple[ParameterSpec, ...], stored: StoredTensors) -> dict[str, int]:
    if not specs:
        return {}
    kinds = _kinds(specs)
    sums: Counter[str] = Counter()
    for name, tensor in stored.tensors.items():
        sums[kinds.get(name, "unknown")] += tensor.size_bytes
    return dict(sums)


def _count_parameters(specs: tuple[ParameterSpec, ...], stored: StoredTensors) -> int:
    kinds = _kinds(specs)
    total = 0
    for name, tensor in stored.tensors.items():
        kind = kinds.get(name)
        if kind is not TensorKind.EXPERT_SCALE:
            total += math.prod(tensor.shape) * (_FP4_PER_BYTE if kind is TensorKind.EXPERT_MATRIX else 1)
    return total


def render(summary: CheckpointSummary) -> str:
    """The summary as plain text of a few lines, without a newline at the end."""
    lines = [str(summary.directory)]
    config = summary.config
    if config is not None:
        lines += [
            f"  layout      {summary.layout}, MXFP4 experts",
            f"  layers      {config.num_hidden_layers} ({len(config.sliding_layers)} sliding over "
            f"{config.sliding_window} tokens, {len(config.full_layers)} full)",
            f"  experts     {config.num_experts}, {config.experts_per_token} per token",
            f"  hidden      {config.hidden_size}, expert intermediate {config.intermediate_size}",
            f"  attention   {config.num_attention_heads} query heads, {config.num_key_value_heads} kv heads, "
            f"head dim {config.head_dim}",
            f"  vocabulary  {config.vocab_size}",
            f"  context     {config.max_context_tokens} tokens",
        ]
    lines += [
        f"  parameters  {summary.parameters:,}",
        f"  data        {_size(summary.size_bytes)} in {summary.tensors} tensors, "
        + ", ".join(f"{dtype} {_size(size)}" for dtype, size in _largest_first(summary.bytes_by_dtype)),
    ]
    lines += [f"    {kind:<14} {_size(size)}" for kind, size in _largest_first(summary.bytes_by_kind)]
    lines += [f"  file        {name} ({_size(size)})" for name, size in summary.files]
    lines += [f"  problem     {problem}" for problem in summary.problems] or ["  problems    none"]
    return "\n".join(lines)


def _largest_first(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


def _size(size_bytes: int) -> str:
    """Decimal units, three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"
