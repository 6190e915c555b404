"""One file of converted weights: a safetensors file whose header also holds a checksum of every tensor.

It is written under a name that no reader looks for and renamed when it is whole. It is not flushed to the
disk before: what a crash of the machine leaves of it is found out by the checksums, when it is read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon.model.checkpoint.direct_read import DirectReader, opened
from antiphon.model.checkpoint.safetensors_file import (
    StoredTensor,
    encode_header,
    read_header,
    read_metadata,
)
from antiphon.model.weight_cache.checksum import checksum
from antiphon.protocol.errors import CheckpointError

FORMAT_VERSION = 1
"""Counts up whenever converted weights come out as other bytes, so that old files are made anew."""
PARTIAL_SUFFIX = ".partial"
_DTYPES = {
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COPY_BYTES = 64 << 20
_READ_AHEAD = 8
"""Tensors that are on their way while one is used: those of a whole layer."""


class DamagedCacheError(Exception):
    """A file of converted weights is not what it should be; the message says which file and how."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Name, shape and dtype of a tensor that a file holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightFileWriter:
    """Writes one file, tensor by tensor; it appears when ``commit`` returns, or never.

    Of several processes that would write the same file, one does; a lock on the unfinished file, which ends
    with the process that holds it, says which.

    Args:
        path: where the file shall be; it is written beside it.
        forms: its tensors, in order.
        device: of these tensors.

    Raises:
        BlockingIOError: another process is writing it, or has just done so.
        OSError: the folder is not writable.
    """

    def __init__(self, path: Path, forms: Iterable[TensorForm], device: torch.device) -> None:
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._forms = tuple(forms)
        self._checksums: dict[str, Tensor] = {}
        # Checksums have a fixed width, so the header that follows when they are known has this size too.
        header, size = self._header({form.name: 0 for form in self._forms})
        self._at = len(header)
        self._host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(self._file, self._partial)
            os.ftruncate(self._file, 0)  # what a process left that was killed
            os.ftruncate(self._file, size)
        except OSError:
            self._close()
            raise

    def write(self, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            ValueError: it is not the one that comes next.
            OSError: the disk is full or not writable.
        """
        form = self._forms[len(self._checksums)]
        if (tuple(tensor.shape), tensor.dtype) != (form.shape, form.dtype):
            raise ValueError(
                f"{form.name}: {tuple(tensor.shape)} {tensor.dtype}, expected {form.shape} {form.dtype}"
            )
        self._checksums[form.name] = checksum(tensor, form.name)
        flat = tensor.view(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _COPY_BYTES):
            part = flat[begin : begin + _COPY_BYTES]
            host = self._host[: part.numel()].copy_(part)
            self._write_bytes(host.numpy().data, self._at + begin)
        self._at += flat.numel()

    def commit(self) -> None:
        """Let the file appear.

        Raises:
            ValueError: tensors are missing.
            OSError: it cannot be written or renamed.
        """
        missing = [form.name for form in self._forms[len(self._checksums) :]]
        if missing:
            raise ValueError(f"{self._path}: {missing[0]}: not given (and {len(missing) - 1} more)")
        header, _ = self._header({name: int(value) for name, value in self._checksums.items()})
        self._write_bytes(memoryview(header), 0)
        self._partial.replace(self._path)
        self._close()

    def abort(self) -> None:
        """Leave nothing behind; after ``commit``, does nothing."""
        if self._file >= 0:
            self._partial.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _write_bytes(self, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at + done)

    def _header(self, checksums: Mapping[str, int]) -> tuple[bytes, int]:
        return _encode(self._forms, checksums)


def size_of(forms: Iterable[TensorForm]) -> int:
    """Bytes of a file that holds these tensors."""
    held = tuple(forms)
    return _encode(held, {form.name: 0 for form in held})[1]


def _encode(forms: tuple[TensorForm, ...], checksums: Mapping[str, int]) -> tuple[bytes, int]:
    written = {name: f"{value % 2**64:016x}" for name, value in checksums.items()}
    metadata = {"format_version": str(FORMAT_VERSION), "checksums": json.dumps(written)}
    return encode_header(((form.name, _CODES[form.dtype], form.shape) for form in forms), metadata)


def _lock(file: int, path: Path) -> None:
    """Be the one process that writes an unfinished file.

    Raises:
        BlockingIOError: another one is, or was until now and has renamed it.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        renamed = os.fstat(file).st_ino != path.stat().st_ino
    except FileNotFoundError:
        renamed = True
    if renamed:
        raise BlockingIOError(f"{path}: was just finished by another process")


def remove_abandoned(partial: Path) -> bool:
    """Delete an unfinished file that no process is writing; whether there was one."""
    try:
        file = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        _lock(file, partial)
        partial.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def read_weight_file(
    path: Path, forms: Iterable[TensorForm], device: torch.device
) -> Generator[Tensor, None, None]:
    """The tensors of a file, straight onto a device; each was checked when it is given.

    The next ones are being read while one is used; closing the generator ends that.

    Raises:
        DamagedCacheError: the file holds something else, or a tensor's bytes are not what was written.
        OSError: there is no such file.
    """
    wanted = tuple(forms)
    with opened(path) as file, DirectReader(device) as reader:
        stored, sums = _described(path, wanted)
        coming: deque[tuple[TensorForm, Tensor, list[Future[None]]]] = deque()
        for form, place in zip(wanted, stored, strict=True):
            into = torch.empty(form.shape, dtype=form.dtype, device=device)
            coming.append((form, into, reader.read(file, place.begin, into)))
            if len(coming) > _READ_AHEAD:
                yield _finished(path, sums, *coming.popleft())
        while coming:
            yield _finished(path, sums, *coming.popleft())


def _finished(
    path: Path, sums: Mapping[str, int], form: TensorForm, tensor: Tensor, pieces: list[Future[None]]
) -> Tensor:
    try:
        for piece in pieces:
            piece.result()
    except OSError as error:
        raise DamagedCacheError(f"{path}: {form.name}: cannot be read: {error}") from error
    if int(checksum(tensor, form.name)) % 2**64 != sums[form.name]:
        raise DamagedCacheError(f"{path}: {form.name}: its checksum is not the one it was written with")
    return tensor


def _described(path: Path, wanted: tuple[TensorForm, ...]) -> tuple[list[StoredTensor], dict[str, int]]:
    """Where the wanted tensors lie, and their checksums."""
    try:
        stored = {tensor.name: tensor for tensor in read_header(path)}
        metadata = read_metadata(path)
        sums = {name: int(value, 16) for name, value in json.loads(metadata["checksums"]).items()}
    except CheckpointError as error:
        raise DamagedCacheError(str(error)) from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCacheError(f"{path}: its header has no checksums: {error!r}") from error
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise DamagedCacheError(f"{path}: of format {metadata.get('format_version')}, not {FORMAT_VERSION}")
    names = [form.name for form in wanted]
    if sorted(stored) != sorted(names) or sorted(sums) != sorted(names):
        raise DamagedCacheError(f"{path}: holds other tensors than a file of its name should")
    for form in wanted:
        found = stored[form.name]
        if (found.shape, found.dtype) != (form.shape, _CODES[form.dtype]):
            raise DamagedCacheError(
                f"{path}: {form.name}: {found.dtype} {found.shape}, expected {form.dtype} {form.shape}"
            )
    return [stored[name] for name in names], sums
