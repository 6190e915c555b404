"""What copies of runs, and mappings of memory, refuse before CUDA is asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from antiphon.kernels.ipc import memory
from antiphon.kernels.ipc.run_copy import checked_runs


@pytest.mark.parametrize(
    "bad", [(0x1008, 0x2000, 64), (0x1000, 0x2004, 64), (0x1000, 0x2000, 72), (0x1000, 0x2000, 0)]
)
def test_a_run_that_cannot_be_copied_is_named(bad: tuple[int, int, int]) -> None:
    runs = np.array([(0x1000, 0x2000, 64), (0x1000, 0x2000, 16), bad], dtype=np.int64)
    with pytest.raises(ValueError, match=f"run 2: {bad[2]} bytes from {bad[0]:#x} to {bad[1]:#x}"):
        checked_runs(runs)


def test_another_shape_is_refused() -> None:
    for shape in ((0, 3), (2, 2), (3,)):
        with pytest.raises(ValueError, match="expected"):
            checked_runs(np.ones(shape, dtype=np.int64))


def test_rows_are_dense_for_the_launch() -> None:
    runs = np.arange(16, 16 * 61, 16, dtype=np.int64).reshape(-1, 6)[:, ::2]
    rows = checked_runs(runs)
    assert rows.flags.c_contiguous
    assert np.array_equal(rows, runs)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_what_is_no_handle_is_not_opened(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer said it, so it is no error of ours."""
    monkeypatch.setattr(memory, "library", lambda: None)
    ours = memory.CudaIpcMemory(torch.device("cuda", 1))
    with pytest.raises(memory.IpcMemoryError, match=f"open on cuda:1: {size} bytes are no handle"):
        ours.open(b"x" * size)
