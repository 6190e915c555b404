"""A stand-in for a GPU's memory that other processes map: files in memory, mapped a second time to be opened.

What is opened so lies at another address than with its owner, as with CUDA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.kv_transfer.peer_memory import PlacedCopies
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


def rows_of(part: PlacedCopies) -> list[list[int]]:
    """(address to read, address to write, bytes) of each run, in numbers of any size.

    Raises:
        ValueError: one leaves its span, or is no multiple of 16.
    """
    found = []
    for entry in part.entries.tolist():
        length = entry[2] if len(entry) == 3 else part.length
        for place in part.places.tolist():
            offsets = [entry[side] * part.steps[side] + place[side] for side in (0, 1)]
            run = [*offsets, length]
            for side, (name, (_, size)) in enumerate(
                (("source", part.source), ("destination", part.destination))
            ):
                if length <= 0 or not 0 <= offsets[side] <= size - length:
                    raise ValueError(f"{name} of run {run} lies outside the {size} registered bytes")
            row = [part.source[0] + offsets[0], part.destination[0] + offsets[1], length]
            if any(number % 16 for number in row):
                raise ValueError(f"run {run}: no multiples of 16")
            found.append(row)
    return found


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

    def copy(self, parts: Sequence[PlacedCopies], after: int | None) -> HeldCopy:
        self._check("copy")
        self.waited_for.append(after)
        copy = HeldCopy([row for part in parts for row in rows_of(part)], self.refuses.get("done", ""))
        self.copies.append(copy)
        if not self.holds:
            copy.let_go()
        return copy

    def _check(self, call: str) -> None:
        if call in self.refuses:
            raise RuntimeError(self.refuses[call])
