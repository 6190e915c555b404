"""What mappings of memory refuse before CUDA is asked."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels.ipc import memory


@pytest.mark.parametrize("size", [0, 63, 65])
def test_what_is_no_handle_is_not_opened(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer said it, so it is no error of ours."""
    monkeypatch.setattr(memory, "library", lambda: None)
    ours = memory.CudaIpcMemory(torch.device("cuda", 1))
    with pytest.raises(memory.IpcMemoryError, match=f"open on cuda:1: {size} bytes are no handle"):
        ours.open(b"x" * size)
