"""Which weights a checkpoint's experts are, told without reading all of them."""

from __future__ import annotations

import hashlib
import os

from antiphon.model.checkpoint.direct_read import opened
from antiphon.model.checkpoint.index import CheckpointIndex
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.protocol.errors import CheckpointError

_EXPERT_KINDS = (TensorKind.EXPERT_MATRIX, TensorKind.EXPERT_SCALE, TensorKind.EXPERT_BIAS)
_SAMPLE_BYTES = 4096


def expert_fingerprint(index: CheckpointIndex) -> str:
    """32 hex digits that change with a checkpoint's expert weights, their names, shapes or files.

    Of every tensor the middle 4 KiB are read; the rest is vouched for by size and time of the files, so that
    a copy of a checkpoint may have another fingerprint, and one that was written over has.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256(repr(index.config).encode())
    names = [part.name for each in index.parameters if each.kind in _EXPERT_KINDS for part in each.parts]
    by_file = sorted((index.tensors[name].file, name) for name in names)
    for path in sorted({file for file, _ in by_file}):
        try:
            with opened(path) as file:
                status = os.fstat(file)
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
                for name in (name for holder, name in by_file if holder == path):
                    tensor = index.tensors[name]
                    middle = (tensor.begin + tensor.end - _SAMPLE_BYTES) // 2
                    begin = max(tensor.begin, middle)
                    count = min(_SAMPLE_BYTES, tensor.end - begin)
                    digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.begin}".encode())
                    digest.update(os.pread(file, count, begin))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]
