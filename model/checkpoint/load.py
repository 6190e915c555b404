"""From a checkpoint's files to a model's memory; every tensor is read exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.checkpoint.read import ParameterReader
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import CheckpointError

_BLOCKS, _SCALES = ".blocks", ".scales"
_DEQUANTIZE_VALUES = 2**24
"""Expert values widened at one time: bounds the float32 scratch memory (64 MiB and its like)."""


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    with_unembedding: bool = True,
) -> Transformer:
    """Read a checkpoint of either layout into a plain-torch model.

    Args:
        directory: folder with config.json and safetensors files.
        dtype: float32 or bfloat16; MXFP4 experts are dequantised to it once, here (exact in both).
        device: where the model lives.
        with_unembedding: False for workers that never sample.

    Raises:
        CheckpointError: see ``open_checkpoint`` and ``read_parameters``.
    """
    index = open_checkpoint(directory)
    model = Transformer(index.config, dtype, device, with_unembedding)
    skip = frozenset[TensorKind]() if with_unembedding else frozenset({TensorKind.UNEMBEDDING})
    fill(model, read_parameters(index, skip))
    return model


def read_parameters(
    index: CheckpointIndex,
    skip: frozenset[TensorKind] = frozenset(),
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Parameters in the order of the model, on a device, in the dtype of the files.

    Yields:
        (OpenAI's name, tensor). Experts come as ``...blocks`` and ``...scales``, uint8. A tensor may be a
        view of the mapped file: copy it before the file can change.

    Raises:
        CheckpointError: a file that cannot be read, or an expert scale that is not a number (255 in E8M0).
    """
    with ParameterReader(index, device) as reader:
        for parameter in index.parameters:
            if parameter.kind not in skip:
                yield parameter.name, reader.read(parameter)


def fill(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Copy parameters into a model, converting dtype and device and dequantising experts.

    Raises:
        CheckpointError: a parameter that the model does not have, has another shape for, gets twice or not
            at all.
    """
    targets = dict(model.named_parameters())
    filled: set[str] = set()
    halves: dict[str, Tensor] = {}

    def target(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in targets:
            raise CheckpointError(f"{name}: the model has no such parameter")
        if name in filled:
            raise CheckpointError(f"{name}: given twice")
        if tuple(targets[name].shape) != shape:
            raise CheckpointError(f"{name}: shape {list(shape)}, expected {list(targets[name].shape)}")
        filled.add(name)
        return targets[name]

    for name, tensor in parameters:
        if not name.endswith((_BLOCKS, _SCALES)):
            target(name, tuple(tensor.shape)).copy_(tensor)
            continue
        if name in halves:
            raise CheckpointError(f"{name}: given twice")
        halves[name] = tensor
        whole = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if whole + _BLOCKS in halves and whole + _SCALES in halves:
            matrix = ExpertMatrix(halves.pop(whole + _BLOCKS), halves.pop(whole + _SCALES))
            experts, rows, blocks, half = matrix.blocks.shape
            _dequantize_into(matrix, target(whole, (experts, rows, blocks * half * 2)))
    missing = [name for name in targets if name not in filled]
    if missing:
        raise CheckpointError(f"{missing[0]}: not given (and {len(missing) - 1} more)")


def _dequantize_into(matrix: ExpertMatrix, out: Tensor) -> None:
    """Widen a few experts at a time, on the device of the result."""
    experts, rows, cols = out.shape
    step = max(1, _DEQUANTIZE_VALUES // (rows * cols))
    for begin in range(0, experts, step):
        part = slice(begin, begin + step)
        blocks, scales = matrix.blocks[part].to(out.device), matrix.scales[part].to(out.device)
        out[part] = dequantize_mxfp4(ExpertMatrix(blocks, scales), out.dtype)
