"""Headers of safetensors files, read and checked without touching a byte of tensor data.

Format (safetensors 0.x): 8 bytes little-endian header length, a JSON object of name -> dtype, shape and
data_offsets (relative to the end of the header), then the data without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from antiphon.protocol.errors import CheckpointError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it; ``begin`` and ``end`` are offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return self.end - self.begin


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Every tensor of a safetensors file, by offset.

    Raises:
        CheckpointError: not a safetensors file; a header that contradicts itself (a name twice, offsets that
            do not fit the shape, overlap or leave a gap); a file that is shorter (truncated) or longer than
            its header says. The message names the file and, where there is one, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path}: truncated: {size} bytes, not even a safetensors header")
            (length,) = struct.unpack("<Q", start)
            if (start + file.read(len(_LFS_POINTER) - 8)).startswith(_LFS_POINTER):
                raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run git lfs pull")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: not a safetensors file: header of {length} bytes")
            if 8 + length > size:
                raise CheckpointError(f"{path}: truncated inside its header: {size} of {8 + length} bytes")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    tensors = [_stored(path, name, entry, 8 + length) for name, entry in _entries(path, raw)]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_extent(path, tensors, 8 + length, size)
    return tuple(tensors)


def _entries(path: Path, raw: bytes) -> Iterable[tuple[str, object]]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: {twice}: twice in the header")
        return tree

    try:
        tree = json.loads(raw, object_pairs_hook=unique)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file: header is not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: not a safetensors file: header is not a JSON object")
    return [(name, entry) for name, entry in tree.items() if name != "__metadata__"]


def _stored(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {name}: malformed header entry {entry!r}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: {name}: unknown dtype {dtype!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name}: malformed header entry {entry!r}")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name}: {end - begin} bytes, but {dtype} {list(shape)} takes {expected}"
        )
    return StoredTensor(name, path, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extent(path: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.begin != end:
            what = "overlaps the tensor before it" if tensor.begin < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {tensor.name}: {what}")
        end = tensor.end
        if end > size:
            raise CheckpointError(
                f"{path}: {tensor.name}: truncated: the tensor ends at byte {end}, the file at {size}"
            )
    if size > end:
        raise CheckpointError(f"{path}: {size - end} surplus bytes after the last tensor")


def read_metadata(path: Path) -> dict[str, str]:
    """What the writer of a safetensors file says about it; empty when it says nothing.

    Raises:
        CheckpointError: the header cannot be read.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            raw = file.read(min(length, _MAX_HEADER_BYTES))
        tree = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    metadata = tree.get("__metadata__", {}) if isinstance(tree, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: metadata is not an object of strings")
    return metadata


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """Header (length prefix included) of a file holding (name, dtype, shape) in this order.

    Args:
        metadata: what else the header says; see ``read_metadata``.

    Returns:
        the bytes before the data, padded to a multiple of 8, and the size of the whole file in bytes.
    """
    tree: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(tree, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, 8 + len(raw) + offset
