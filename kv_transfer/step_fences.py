"""Whether the device has come past a point in the order of a worker's steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from antiphon.protocol.rank_messages import StepMark

Fence = Callable[[], bool]
"""Whether everything that was issued before it is done; does not block."""


@dataclass(frozen=True, slots=True)
class DeviceFence:
    """A fence that other work of the same GPU can wait for; implements ``transport.DeviceEvent``."""

    query: Fence
    handle: int
    """Of the CUDA event."""
    event: object
    """Which lives as long as this."""

    def __call__(self) -> bool:
        """See Fence."""
        return self.query()


class StepFences:
    """One rank's points of its steps, in order. ``record`` and ``passed`` may be called from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[StepMark, Fence]] = deque()
        self._passed = StepMark(0, 0)

    def record(self, mark: StepMark, fence: Fence | None) -> None:
        """This rank has issued everything up to ``mark``, which is not before the last one.

        Args:
            fence: absent when it is done already, as on a CPU.
        """
        with self._lock:
            self._waiting.append((mark, fence or _done))
            self._advance()

    def passed(self, mark: StepMark) -> bool:
        """Whether everything up to ``mark`` is done here."""
        with self._lock:
            self._advance()
            return self._passed >= mark

    def device_fence(self, mark: StepMark) -> DeviceFence | None:
        """What a GPU can wait for until ``mark``; None when it has passed, is not issued, or has no event."""
        with self._lock:
            self._advance()
            if self._passed >= mark:
                return None
            fence = next((fence for at, fence in self._waiting if at >= mark), None)
            return fence if isinstance(fence, DeviceFence) else None

    def _advance(self) -> None:
        while self._waiting and self._waiting[0][1]():
            self._passed = max(self._passed, self._waiting.popleft()[0])


def _done() -> bool:
    return True
