"""``antiphon weights``: what the folder of converted weights holds, and room in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from antiphon.model.weight_cache.store import CachedFile, WeightCache
from antiphon.protocol.errors import AntiphonError

_GIB = 2**30


def list_weights(directory: Path) -> None:
    """Print every file, the least recently used first, and their sum.

    Raises:
        AntiphonError: no such folder.
    """
    files = _open(directory).files()
    for file in files:
        print(_line(file))
    print(f"{_total(files):.2f} GiB in {len(files)} files of {directory}")


def prune_weights(directory: Path, limit_gib: float) -> None:
    """Delete the least recently used files until the rest keep to a limit, and what nobody finished.

    Raises:
        AntiphonError: no such folder, or it may not be written.
    """
    try:
        deleted = _open(directory).prune(int(limit_gib * _GIB))
    except OSError as error:
        raise AntiphonError(f"{directory}: cannot be pruned: {error.strerror}") from error
    for file in deleted:
        print(_line(file))
    print(f"{_total(deleted):.2f} GiB deleted")


def _open(directory: Path) -> WeightCache:
    folder = directory.expanduser()
    if not folder.is_dir():
        raise AntiphonError(f"{folder}: no such folder of converted weights")
    return WeightCache(folder, 0)


def _line(file: CachedFile) -> str:
    used = datetime.fromtimestamp(file.used_at_s, UTC).strftime("%Y-%m-%d %H:%M")
    return f"{used}  {file.size_bytes / _GIB:8.2f} GiB  {file.path.name}"


def _total(files: list[CachedFile]) -> float:
    return sum(file.size_bytes for file in files) / _GIB
