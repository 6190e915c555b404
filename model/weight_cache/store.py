"""The folder of converted weights: what is in it, and room for more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from antiphon.model.weight_cache.weight_file import PARTIAL_SUFFIX, remove_abandoned

SUFFIX = ".weights"
FREE_SHARE = 0.05
"""Of a disk, which is never taken."""


class NoRoomError(Exception):
    """A file is not written because the cache's limit or the disk does not allow it."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of the cache.

    Attributes:
        used_at_s: when it was last written or loaded, in seconds since 1970.
    """

    path: Path
    size_bytes: int
    used_at_s: float


@dataclass(frozen=True, slots=True)
class WeightCache:
    """Files of converted weights in one folder, which several processes may use at one time.

    A file that is deleted while another process reads it stays readable there.

    Attributes:
        directory: made when the first file is written.
        limit_bytes: what all files may take; the least recently used go first.
    """

    directory: Path
    limit_bytes: int

    def path(self, name: str) -> Path:
        """Where the file of a name is, or would be."""
        return self.directory / (name + SUFFIX)

    def files(self) -> list[CachedFile]:
        """What is there, the least recently used first."""
        found = []
        for path in self.directory.glob("*" + SUFFIX):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process has just deleted it
            found.append(CachedFile(path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: (file.used_at_s, file.path))

    def used(self, path: Path) -> None:
        """Note that a file was loaded; a cache that cannot be written cannot be pruned by use either."""
        if os.access(path, os.W_OK):
            os.utime(path)

    def make_room(self, size_bytes: int, keep: Collection[Path] = ()) -> list[CachedFile]:
        """Have room for a new file, deleting others where needed.

        Args:
            size_bytes: of the new file.
            keep: files that must stay.

        Returns:
            what was deleted.

        Raises:
            NoRoomError: the limit or the disk is too small; nothing was deleted then.
            OSError: the folder is not writable.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        kept = sum(file.size_bytes for file in self.files() if file.path in keep)
        wanted = kept + size_bytes
        if wanted > self.limit_bytes:
            raise NoRoomError(
                f"{wanted / 2**30:.1f} GiB exceed the limit of {self.limit_bytes / 2**30:.1f} GiB"
            )
        others = [file for file in self.files() if file.path not in keep]
        disk = shutil.disk_usage(self.directory)
        spare = disk.free - int(disk.total * FREE_SHARE) - size_bytes
        if spare + sum(file.size_bytes for file in others) < 0:
            raise NoRoomError(
                f"{self.directory}: {size_bytes / 2**30:.1f} GiB would fill the disk beyond "
                f"{1 - FREE_SHARE:.0%}"
            )
        self._remove_abandoned()
        return self._delete_down_to(others, self.limit_bytes - wanted, spare)

    def prune(self, limit_bytes: int) -> list[CachedFile]:
        """Delete the least recently used files until the rest keep to a limit; returns what went."""
        self._remove_abandoned()
        return self._delete_down_to(self.files(), limit_bytes, 0)

    def discard(self, path: Path) -> None:
        """Delete a file that is of no use.

        Raises:
            OSError: the folder is not writable.
        """
        path.unlink(missing_ok=True)

    def _delete_down_to(
        self, files: list[CachedFile], limit_bytes: int, spare_bytes: int
    ) -> list[CachedFile]:
        """Delete until the files take no more than the limit and ``spare_bytes``, if negative, came free."""
        total = sum(file.size_bytes for file in files)
        deleted = []
        for file in files:
            if total <= limit_bytes and spare_bytes >= 0:
                break
            self.discard(file.path)
            total -= file.size_bytes
            spare_bytes += file.size_bytes
            deleted.append(file)
        return deleted

    def _remove_abandoned(self) -> None:
        for partial in self.directory.glob("*" + PARTIAL_SUFFIX):
            remove_abandoned(partial)
