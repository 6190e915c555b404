"""Registered host memory for transport tests, and two ends of staged writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.kv_transfer.transport import Copies, Memory

sys.path.insert(0, str(Path(__file__).parent))

from staged_ends import Ends


class Buffer:
    """Bytes that a transport may register."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self.bytes = np.full(size, fill, dtype=np.uint8)

    @property
    def memory(self) -> Memory:
        return Memory(self.bytes.ctypes.data, self.bytes.nbytes)


def runs(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@pytest.fixture
def buffer_type() -> type[Buffer]:
    return Buffer


def copies(source: Memory, destination: Memory, *rows: tuple[int, int, int]) -> list[Copies]:
    return [Copies(source, destination, runs(*rows))]


@pytest.fixture
def make_copies() -> object:
    return copies


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for side in (made.source, made.target):
        side.endpoint.stop()
        assert not side.failures
