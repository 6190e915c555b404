"""The order of calls behind copies of runs: which stream, which event, and when an event is used again."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.kernels.ipc import run_copy
from antiphon.kernels.ipc.run_copy import RunCopier
from antiphon.kv_transfer.peer_memory import PlacedCopies

ENTRIES = np.array([(2, 0), (1, 7)], dtype=np.int64)
PLACES = np.array([(0, 16), (64, 80), (96, 96)], dtype=np.int64)
PARTS = [
    PlacedCopies(ENTRIES, (256, 512), PLACES, 16, (0x1000, 1024), (0x8000, 4096)),
    PlacedCopies(np.array([(0, 16, 48)], dtype=np.int64), (1, 1), PLACES[:1], 0, (0x1000, 64), (0x2000, 64)),
]
NOT_READY, ILLEGAL_ADDRESS = 600, 700


class Library:
    """Stands for the library; handles are numbers from 1 on."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.began: list[tuple[Any, ...]] = []
        self.states: dict[int, int] = {}
        self.launch_status = 0
        self.bad_run: list[int] = []

    def _make(self, what: str, place: Any) -> int:
        self.made.append(what)
        place._obj.value = len(self.made)
        return 0

    def antiphon_copy_stream_make(self, device: int, place: Any) -> int:
        return self._make("stream", place)

    def antiphon_copy_event_make(self, device: int, place: Any) -> int:
        return self._make("event", place)

    def antiphon_copy_pages(
        self,
        device: int,
        parts: int,
        count: int,
        blocks: int,
        lane: int,
        after: int | None,
        done: int,
        bad: int,
    ) -> int:
        if self.bad_run:
            (ctypes.c_int64 * 5).from_address(bad)[:] = self.bad_run
            return -1
        listed = (ctypes.c_int64 * (12 * count)).from_address(parts)
        self.began.append((device, list(listed), blocks, lane, after, done))
        self.states[done] = NOT_READY
        return self.launch_status

    def antiphon_copy_state(self, done: int) -> int:
        return self.states[done]

    def antiphon_ipc_reason(self, status: int) -> bytes:
        return f"reason {status}".encode()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(run_copy, "quick_library", lambda: made)
    return made


def test_what_waits_has_a_stream_of_its_own(library: Library) -> None:
    copier = RunCopier(torch.device("cuda", 3), blocks=5)
    copier.copy(PARTS)
    copier.copy(PARTS, after=77)
    assert library.made == ["stream", "stream", "event", "event"]
    places, run = PLACES.ctypes.data, PARTS[1].entries.ctypes.data
    pages = [ENTRIES.ctypes.data, 2, 2, 256, 512, places, 3, 16, 0x1000, 1024, 0x8000, 4096]
    parts = [*pages, run, 1, 3, 1, 1, places, 1, 0, 0x1000, 64, 0x2000, 64]
    assert library.began == [(3, parts, 5, 1, None, 3), (3, parts, 5, 2, 77, 4)]


def test_what_waits_for_nothing_takes_more_of_the_device(library: Library) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    copier.copy(PARTS, after=77)
    copier.copy(PARTS)
    assert [began[2] for began in library.began] == [run_copy.WAITING_BLOCKS, run_copy.READY_BLOCKS]


def test_an_event_is_used_again_once_its_copy_was_seen_over(library: Library) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    first, second = copier.copy(PARTS), copier.copy(PARTS)
    assert not first.done()
    library.states[3] = 0
    assert first.done()
    third = copier.copy(PARTS)
    assert [began[-1] for began in library.began] == [3, 4, 3]
    assert first.done(), "whatever becomes of the event it had"
    assert not second.done()
    assert not third.done()


def test_a_failed_device_is_an_error(library: Library) -> None:
    running = RunCopier(torch.device("cuda", 0)).copy(PARTS)
    library.states[3] = ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match=r"a copy between GPUs ended: reason 700 \(CUDA error 700\)"):
        running.done()


def test_a_refused_launch_is_an_error_once_what_was_launched_before_it_is_over(library: Library) -> None:
    """Of a long list some runs may be under way, or wait for their event."""
    copier = RunCopier(torch.device("cuda", 0))
    library.launch_status = 2
    running = copier.copy(PARTS, after=77)
    assert not running.done()
    library.states[3] = library.launch_status = 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was not launched: reason 2"):
            running.done()
    copier.copy(PARTS)
    assert [began[-1] for began in library.began] == [3, 3], "its event is used again"


def test_a_copy_for_which_there_is_no_event_is_not_begun(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    monkeypatch.setattr(library, "antiphon_copy_event_make", lambda device, place: 2)
    with pytest.raises(RuntimeError, match="no event for copies on cuda:0: reason 2"):
        copier.copy(PARTS)
    assert not library.began


@pytest.mark.parametrize(
    ("bad_run", "reason"),
    [
        ([1, 0, 2048, 16, 32], r"source of run \[2048, 16, 32\] lies outside the 1024 registered bytes"),
        ([2, 1, 0, -16, 48], r"destination of run \[0, -16, 48\] lies outside the 64 registered bytes"),
        ([3, 1, 8, 0, 16], r"run \[8, 0, 16\], from 0x1000 to 0x2000: no multiples of 16"),
    ],
)
def test_a_run_that_may_not_be_copied_is_named(bad_run: list[int], reason: str, library: Library) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    library.bad_run = bad_run
    with pytest.raises(ValueError, match=reason):
        copier.copy(PARTS)
    library.bad_run = []
    copier.copy(PARTS)
    assert [began[-1] for began in library.began] == [3], "the event that nothing was recorded in"


@pytest.mark.parametrize(
    ("entries", "places"),
    [
        (np.ones((0, 2), np.int64), PLACES),
        (ENTRIES, PLACES[:0]),
        (np.ones((4, 4), np.int64), PLACES),
        (ENTRIES[0], PLACES),
        (ENTRIES[:, ::-1], PLACES),
        (ENTRIES, PLACES[::2]),
        (ENTRIES.astype(np.int32), PLACES),
        (ENTRIES, np.ones((2, 3), np.int64)),
    ],
)
def test_arrays_of_another_shape_are_refused(
    entries: NDArray[Any], places: NDArray[Any], library: Library
) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"expected \[N, 2 or 3\] and \[R, 2\]"):
        copier.copy([PlacedCopies(entries, (1, 1), places, 16, (0, 4096), (0, 4096))])
    assert not library.began
