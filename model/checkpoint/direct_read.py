"""Ranges of files read straight into a device's memory, by several threads.

Reading with ``preadv`` into buffers that are used again and again avoids the page faults that mapping a file
costs, one for every 4 KiB, and on a GPU the buffers are pinned, so that a copy to the device runs while the
next piece is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""What one thread reads at a time."""
MAX_THREADS = 8


class ShortReadError(OSError):
    """A file ended before the range that was asked for."""


class DirectReader:
    """Reads into tensors of one device; a context manager that ends its threads.

    Args:
        device: of all tensors.
        threads: that read at one time; as many as there are processors, up to 8, when None.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self._device = device
        count = min(MAX_THREADS, os.cpu_count() or 1) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weights")
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        if device.type == "cuda":
            for _ in range(2 * count):
                self._buffers.put(_Buffer(device))

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, file: int, begin: int, into: Tensor) -> list[Future[None]]:
        """Start to fill ``into``, contiguous and of this device, from byte ``begin`` of an open file.

        Returns:
            what to wait for before the tensor is used, or the file closed; each raises OSError if the file
            could not be read, ShortReadError if it ended too early.
        """
        flat = into.view(-1).view(torch.uint8)
        # The memory of a new tensor may still be read by what was issued before: copies wait for that.
        issued = torch.cuda.current_stream(self._device).record_event() if into.is_cuda else None
        return [
            self._pool.submit(self._piece, file, begin + offset, flat[offset : offset + PIECE_BYTES], issued)
            for offset in range(0, flat.numel(), PIECE_BYTES)
        ]

    def _piece(self, file: int, begin: int, target: Tensor, issued: torch.cuda.Event | None) -> None:
        if issued is None:
            read_exactly(file, begin, target)
            return
        buffer = self._buffers.get()
        try:
            buffer.fill(file, begin, target, issued)
        finally:
            self._buffers.put(buffer)


class _Buffer:
    """Pinned memory, and the stream on which it is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fill(self, file: int, begin: int, target: Tensor, issued: torch.cuda.Event) -> None:
        part = self._host[: target.numel()]
        read_exactly(file, begin, part)
        self._stream.wait_event(issued)
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)
        self._stream.synchronize()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file's descriptor, for as long as it is read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def read_exactly(file: int, begin: int, target: Tensor) -> None:
    """Fill ``target``, uint8 on the CPU, from byte ``begin`` on.

    Raises:
        ShortReadError: the file is shorter.
        OSError: it cannot be read.
    """
    memory = target.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], begin + done)
        if count == 0:
            raise ShortReadError(f"the file ends {len(memory) - done} bytes too early")
        done += count
