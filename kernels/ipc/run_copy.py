"""Copies of runs of bytes between GPUs of one host: one launch a copy, on streams of their own."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.kernels.ipc.library import quick_library

WORD_BYTES = 16
BLOCKS = 32
"""Of 512 threads, which together keep 2 MiB on their way: a quarter of an H200's SMs, for 0.2 ms."""
_NOT_READY = 600


class RunningCopy:
    """One copy that was launched, or as much of it as CUDA did not refuse.

    Args:
        launched: CUDA's status.
    """

    __slots__ = ("_copier", "_event", "_launched", "_over")

    def __init__(self, copier: RunCopier, event: int, launched: int) -> None:
        self._copier = copier
        self._event = event
        self._launched = launched
        self._over = False

    def done(self) -> bool:
        """Whether every byte is where it was to go; does not block.

        Raises:
            RuntimeError: what the device did has ended in an error, and nothing on it can go on; or CUDA
                refused a launch, and those before it are over.
        """
        if not self._over:
            status = quick_library().antiphon_copy_state(self._event)
            if status == _NOT_READY:
                return False
            _check(status, "a copy between GPUs ended")
            self._over = True
            self._copier._events.append(self._event)
        _check(self._launched, "a copy between GPUs was not launched")
        return True


class RunCopier:
    """Launches copies of one device; for one thread.

    Copies that wait for an event have a stream of their own: what is ready is not behind them.

    Args:
        device: which does the copies.
        blocks: of each launch.

    Raises:
        KernelLibraryError: the library was not built.
    """

    def __init__(self, device: torch.device, blocks: int = BLOCKS) -> None:
        self._library = quick_library()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._blocks = blocks
        self._ready_stream, self._waiting_stream = self._make("stream"), self._make("stream")
        self._events: list[int] = []
        """Events that nothing waits for."""

    def copy(self, runs: NDArray[np.int64], after: int | None = None) -> RunningCopy:
        """Launch a copy; what it reads must not change before it is done.

        Args:
            runs: [N, 3] int64 rows of (address to read, address to write, bytes), multiples of 16, in
                memory that the device maps; what is written overlaps nothing else of the copy.
            after: handle of a recorded CUDA event of the device that must have passed before.

        Raises:
            ValueError: a run that is empty or no multiple of 16; names it.
            RuntimeError: CUDA made no event for it. A launch that it refuses is an error of the copy, which
                may have begun.
        """
        rows = checked_runs(runs)
        event = self._events.pop() if self._events else self._make("event")
        stream = self._ready_stream if after is None else self._waiting_stream
        status = self._library.antiphon_copy_begin(
            *(self._device, rows.ctypes.data, len(rows), self._blocks, stream, after, event)
        )
        return RunningCopy(self, event, status)

    def _make(self, what: str) -> int:
        made = ctypes.c_void_p()
        make = getattr(self._library, f"antiphon_copy_{what}_make")
        _check(make(self._device, ctypes.byref(made)), f"no {what} for copies on cuda:{self._device}")
        return made.value or 0


def _check(status: int, what: str) -> None:
    if status != 0:
        reason = quick_library().antiphon_ipc_reason(status).decode()
        raise RuntimeError(f"{what}: {reason} (CUDA error {status})")


def checked_runs(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same rows, dense.

    Raises:
        ValueError: a run that is empty or no multiple of 16; names it.
    """
    rows = np.ascontiguousarray(runs, dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != 3 or len(rows) == 0:
        raise ValueError(f"runs of shape {rows.shape}, expected [N, 3] and at least one")
    if rows.min() <= 0 or int(np.bitwise_or.reduce(rows, axis=None)) % WORD_BYTES:
        index = int(((rows % WORD_BYTES != 0) | (rows <= 0)).any(axis=1).argmax())
        source, destination, length = rows[index].tolist()
        where = f"{length} bytes from {source:#x} to {destination:#x}"
        raise ValueError(f"run {index}: {where} are no multiples of {WORD_BYTES}")
    return rows


def serves(device: torch.device) -> bool:
    """Whether a device runs these kernels: an H200 does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
