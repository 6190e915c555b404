"""Tensor data of a checkpoint's files, whole or in part.

On a CPU files are mapped, so that only what is used is read and nothing is copied. For another device they
are read straight into its memory, where what is wanted lies in one piece; see ``direct_read``.
"""

from __future__ import annotations

from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from antiphon.model.checkpoint.direct_read import DirectReader, opened
from antiphon.model.checkpoint.index import CheckpointIndex
from antiphon.model.checkpoint.layout import ParameterSpec, TensorKind
from antiphon.model.checkpoint.safetensors_file import StoredTensor
from antiphon.protocol.errors import CheckpointError

_E8M0_NAN = 255
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


class ParameterReader:
    """Reads parameters of one checkpoint; a context manager that closes what it opened.

    Args:
        device: where they are wanted.
        direct: read straight into memory instead of mapping files; None does so on any device but a CPU.
    """

    def __init__(
        self, index: CheckpointIndex, device: torch.device | str = "cpu", direct: bool | None = None
    ) -> None:
        self._index = index
        self._device = torch.device(device)
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._files: dict[Path, int] = {}
        is_direct = self._device.type != "cpu" if direct is None else direct
        self._direct = self._stack.enter_context(DirectReader(self._device)) if is_direct else None

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
        """A parameter, or a part of it, on the reader's device in the dtype of the file.

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
        stored = self._index.tensors[name]
        file = stored.file
        whole_rows = all(
            part.indices(size) == (0, size, 1)
            for part, size in zip(slices[1:], stored.shape[1:], strict=False)
        )
        try:
            if self._direct is not None and whole_rows:
                tensor = self._read_rows(self._direct, stored, slices[0])
            else:
                tensor = self._read_mapped(file, name, slices).to(self._device)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file}: {name}: cannot be read: {error}") from error
        if kind is TensorKind.EXPERT_SCALE and bool((tensor == _E8M0_NAN).any()):
            raise CheckpointError(f"{file}: {name}: holds a block scale of 255, not a number")
        return tensor

    def _read_mapped(self, file: Path, name: str, slices: tuple[slice, ...]) -> Tensor:
        if file not in self._opened:
            opened_file = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            self._opened[file] = opened_file
        return cast(Tensor, self._opened[file].get_slice(name)[slices])

    def _read_rows(self, direct: DirectReader, stored: StoredTensor, rows: slice) -> Tensor:
        begin, end, _ = rows.indices(stored.shape[0])
        if stored.file not in self._files:
            self._files[stored.file] = self._stack.enter_context(opened(stored.file))
        into = torch.empty(
            (end - begin, *stored.shape[1:]), dtype=_TORCH_DTYPES[stored.dtype], device=self._device
        )
        row_bytes = stored.size_bytes // stored.shape[0]
        pieces = direct.read(self._files[stored.file], stored.begin + begin * row_bytes, into)
        wait(pieces)  # of all, since the error of one lets the file be closed
        for piece in pieces:
            piece.result()
        return into
