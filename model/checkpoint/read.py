"""Tensor data of a checkpoint's files, whole or in part; files are mapped, so only what is used is read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from antiphon.model.checkpoint.index import CheckpointIndex
from antiphon.model.checkpoint.layout import ParameterSpec, TensorKind
from antiphon.protocol.errors import CheckpointError

_E8M0_NAN = 255
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


class ParameterReader:
    """Reads parameters of one checkpoint; a context manager that closes what it opened."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> ParameterReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def dtype(self, parameter: ParameterSpec) -> torch.dtype:
        """As in the file."""
        return _TORCH_DTYPES[self._index.tensors[parameter.parts[0].name].dtype]

    def read(self, parameter: ParameterSpec, slices: tuple[slice, ...] = (slice(None),)) -> Tensor:
        """A parameter, or a part of it, on the CPU in the dtype of the file.

        Args:
            slices: one per leading axis of the whole parameter, without steps.

        Returns:
            A tensor that may be a view of the mapped file: copy it before the file can change.

        Raises:
            CheckpointError: a file that cannot be read, or an expert scale that is not a number (255).
        """
        begin, end, _ = slices[0].indices(parameter.shape[0])
        pieces = []
        offset = 0
        for part in parameter.parts:
            rows = part.shape[0]
            low, high = max(begin - offset, 0), min(end - offset, rows)
            offset += rows
            if low < high:
                pieces.append(self._read_tensor(part.name, (slice(low, high), *slices[1:]), parameter.kind))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _read_tensor(self, name: str, slices: tuple[slice, ...], kind: TensorKind) -> Tensor:
        file = self._index.tensors[name].file
        try:
            if file not in self._opened:
                opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                self._opened[file] = opened
            tensor = cast(Tensor, self._opened[file].get_slice(name)[slices])
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file}: {name}: cannot be read: {error}") from error
        if kind is TensorKind.EXPERT_SCALE and bool((tensor == _E8M0_NAN).any()):
            raise CheckpointError(f"{file}: {name}: holds a block scale of 255, not a number")
        return tensor
