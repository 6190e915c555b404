"""The order of calls behind copies of runs: which stream, which event, and when an event is used again."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.kernels.ipc import run_copy
from antiphon.kernels.ipc.run_copy import RunCopier

RUNS = np.array([(0x1000, 0x2000, 32), (0x3000, 0x4000, 16)], dtype=np.int64)
NOT_READY, ILLEGAL_ADDRESS = 600, 700


class Library:
    """Stands for the library; handles are numbers from 1 on."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.began: list[tuple[Any, ...]] = []
        self.states: dict[int, int] = {}
        self.launch_status = 0

    def _make(self, what: str, place: Any) -> int:
        self.made.append(what)
        place._obj.value = len(self.made)
        return 0

    def antiphon_copy_stream_make(self, device: int, place: Any) -> int:
        return self._make("stream", place)

    def antiphon_copy_event_make(self, device: int, place: Any) -> int:
        return self._make("event", place)

    def antiphon_copy_begin(
        self, device: int, rows: int, count: int, blocks: int, lane: int, after: int | None, done: int
    ) -> int:
        listed = (ctypes.c_int64 * (3 * count)).from_address(rows)
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
    copier.copy(RUNS)
    copier.copy(RUNS, after=77)
    assert library.made == ["stream", "stream", "event", "event"]
    rows = RUNS.ravel().tolist()
    assert library.began == [(3, rows, 5, 1, None, 3), (3, rows, 5, 2, 77, 4)]


def test_an_event_is_used_again_once_its_copy_was_seen_over(library: Library) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    first, second = copier.copy(RUNS), copier.copy(RUNS)
    assert not first.done()
    library.states[3] = 0
    assert first.done()
    third = copier.copy(RUNS)
    assert [began[-1] for began in library.began] == [3, 4, 3]
    assert first.done(), "whatever becomes of the event it had"
    assert not second.done()
    assert not third.done()


def test_a_failed_device_is_an_error(library: Library) -> None:
    running = RunCopier(torch.device("cuda", 0)).copy(RUNS)
    library.states[3] = ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match=r"a copy between GPUs ended: reason 700 \(CUDA error 700\)"):
        running.done()


def test_a_refused_launch_is_an_error_once_what_was_launched_before_it_is_over(library: Library) -> None:
    """Of a long list some runs may be under way, or wait for their event."""
    copier = RunCopier(torch.device("cuda", 0))
    library.launch_status = 2
    running = copier.copy(RUNS, after=77)
    assert not running.done()
    library.states[3] = library.launch_status = 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was not launched: reason 2"):
            running.done()
    copier.copy(RUNS)
    assert [began[-1] for began in library.began] == [3, 3], "its event is used again"


def test_a_copy_for_which_there_is_no_event_is_not_begun(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = RunCopier(torch.device("cuda", 0))
    monkeypatch.setattr(library, "antiphon_copy_event_make", lambda device, place: 2)
    with pytest.raises(RuntimeError, match="no event for copies on cuda:0: reason 2"):
        copier.copy(RUNS)
    assert not library.began
