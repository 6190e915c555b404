"""A stand-in for a GPU's memory that other processes map: files in memory, mapped a second time to be opened.

What is opened so lies at another address than with its owner, as with CUDA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.transport import Memory


class Allocation:
    """Bytes that another process could map; ``memory`` is all of them."""

    def __init__(self, host: SharedHost, size: int, fill: int = 0) -> None:
        descriptor = os.memfd_create("allocation")
        os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes[:] = fill
        self.memory = Memory(self.bytes.ctypes.data, size, "VRAM")
        self.handle = f"file {descriptor}".encode()
        host.allocations[self.handle] = self, descriptor


@dataclass
class SharedHost:
    """All allocations of a machine."""

    allocations: dict[bytes, tuple[Allocation, int]] = field(default_factory=dict)


class HeldCopy:
    """A copy that takes effect when the test lets it."""

    def __init__(self, rows: list[list[int]], error: str = "") -> None:
        self.rows, self.error = rows, error
        self.over = False

    def let_go(self) -> None:
        for source, destination, length in self.rows:
            ctypes.memmove(destination, source, length)
        self.over = True

    def done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.over


class SharedMemoryDevice:
    """Implements ``PeerMemory``; copies wait to be let go when ``holds``."""

    def __init__(self, host: SharedHost) -> None:
        self.host = host
        self.holds, self.tells_sizes = False, True
        self.refuses: dict[str, str] = {}
        """Call -> the reason it fails with."""
        self.copies: list[HeldCopy] = []
        self.waited_for: list[int | None] = []
        """The event that each copy was to wait for."""
        self.opened: Counter[bytes] = Counter()
        self.closed: Counter[bytes] = Counter()
        self._open: dict[int, tuple[bytes, object]] = {}

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        self._check("export")
        for allocation, _ in self.host.allocations.values():
            offset = address - allocation.memory.address
            if 0 <= offset <= allocation.memory.length_bytes - size_bytes:
                return allocation.handle, offset
        raise RuntimeError(f"{address:#x} is of no allocation")

    def open(self, handle: bytes) -> tuple[int, int | None]:
        self._check("open")
        allocation, descriptor = self.host.allocations[handle]
        view = np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.uint8)
        self._open[view.ctypes.data] = handle, view
        self.opened[handle] += 1
        return int(view.ctypes.data), allocation.memory.length_bytes if self.tells_sizes else None

    def close(self, address: int) -> None:
        self._check("close")
        handle, _ = self._open.pop(address)
        self.closed[handle] += 1

    def copy(self, runs: NDArray[np.int64], after: int | None) -> HeldCopy:
        self._check("copy")
        self.waited_for.append(after)
        if (runs % 16).any():
            raise ValueError("run 0 is no multiple of 16")
        copy = HeldCopy(runs.tolist(), self.refuses.get("done", ""))
        self.copies.append(copy)
        if not self.holds:
            copy.let_go()
        return copy

    def _check(self, call: str) -> None:
        if call in self.refuses:
            raise RuntimeError(self.refuses[call])
