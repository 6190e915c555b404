"""Copies of runs of bytes between GPUs of one host: one launch a copy, on streams of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.kernels.ipc.library import quick_library

WAITING_BLOCKS = 32
"""Of 512 threads, which together keep 2 MiB on their way: a quarter of an H200's SMs, for 0.2 ms."""
READY_BLOCKS = 64
"""Of a copy that waits for nothing: somebody waits for it, and a copy of 8k is 10 % faster with them."""
_NOT_READY = 600
_BAD_RUN = -1
_SIDES = {1: "source", 2: "destination"}


class SpanCopy(Protocol):
    """Runs of bytes from one span of memory to another, both mapped by the device that copies.

    Its arrays are the same ones each time they are asked for.
    """

    @property
    def entries(self) -> NDArray[np.int64]:
        """[N, 2] numbers of what is copied, at the source and at the destination; or [N, 3], with bytes."""

    @property
    def steps(self) -> tuple[int, int]:
        """Bytes from one number to the next, at the source and at the destination."""

    @property
    def places(self) -> NDArray[np.int64]:
        """[R, 2]: where the runs of every entry begin in it, in bytes."""

    @property
    def length(self) -> int:
        """Bytes of every run, if entries have none."""

    @property
    def source(self) -> tuple[int, int]:
        """Address and bytes of the span that is read."""

    @property
    def destination(self) -> tuple[int, int]:
        """Of the one that is written."""


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
    """Launches copies of one device; for one thread at a time.

    Copies that wait for an event have a stream of their own: what is ready is not behind them.

    Args:
        device: which does the copies.
        blocks: of each launch; None: WAITING_BLOCKS, and READY_BLOCKS of what waits for no event.

    Raises:
        KernelLibraryError: the library was not built.
    """

    def __init__(self, device: torch.device, blocks: int | None = None) -> None:
        self._library = quick_library()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._waiting_blocks, self._ready_blocks = blocks or WAITING_BLOCKS, blocks or READY_BLOCKS
        self._ready_stream, self._waiting_stream = self._make("stream"), self._make("stream")
        self._events: list[int] = []
        """Events that nothing waits for."""
        self._bad_run = np.zeros(5, dtype=np.int64)
        """``BadRun`` of page_rows.cuh."""

    def copy(self, parts: Sequence[SpanCopy], after: int | None = None) -> RunningCopy:
        """Launch a copy; what it reads must not change before it is done.

        Args:
            parts: at least one; what is written overlaps nothing else of the copy.
            after: handle of a recorded CUDA event of the device that must have passed before.

        Raises:
            ValueError: a run that is empty, leaves its span or is no multiple of 16, and which; or arrays of
                other shapes, that are not dense, or empty.
            RuntimeError: CUDA made no event for it. A launch that it refuses is an error of the copy, which
                may have begun.
        """
        table = np.array([_numbers(part) for part in parts], dtype=np.int64)
        event = self._events.pop() if self._events else self._make("event")
        ready = after is None
        stream = self._ready_stream if ready else self._waiting_stream
        blocks = self._ready_blocks if ready else self._waiting_blocks
        status = self._library.antiphon_copy_pages(
            *(self._device, table.ctypes.data, len(table), blocks, stream, after, event),
            self._bad_run.ctypes.data,
        )
        if status == _BAD_RUN:
            self._events.append(event)
            fault, part, *run = self._bad_run.tolist()
            raise ValueError(_reason(parts[part], fault, run))
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


def _numbers(part: SpanCopy) -> tuple[int, ...]:
    """As ``Part`` of page_rows.cuh.

    Raises:
        ValueError: arrays of other shapes; says which.
    """
    entries, places = part.entries, part.places
    dense = entries.flags.c_contiguous and places.flags.c_contiguous
    fits = entries.ndim == places.ndim == 2 and entries.shape[1] in (2, 3) and places.shape[1] == 2
    if not (dense and fits and len(entries) and len(places) and entries.dtype == places.dtype == np.int64):
        raise ValueError(
            f"runs of entries {entries.shape} and places {places.shape}, expected [N, 2 or 3] and [R, 2], "
            "dense, of int64, and at least one of each"
        )
    return (
        *(entries.ctypes.data, *entries.shape, *part.steps),
        *(places.ctypes.data, len(places), part.length),
        *(*part.source, *part.destination),
    )


def _reason(part: SpanCopy, fault: int, run: list[int]) -> str:
    side = _SIDES.get(fault)
    if side is None:
        return f"run {run}, from {part.source[0]:#x} to {part.destination[0]:#x}: no multiples of 16"
    size = (part.source if side == "source" else part.destination)[1]
    return f"{side} of run {run} lies outside the {size} registered bytes"


def serves(device: torch.device) -> bool:
    """Whether a device runs these kernels: an H200 does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
