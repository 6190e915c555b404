"""Whether the device has come past a point in the order of a worker's steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from antiphon.protocol.rank_messages import StepMark

Fence = Callable[[], bool]
"""Whether everything that was issued before it is done; does not block."""


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

    def _advance(self) -> None:
        while self._waiting and self._waiting[0][1]():
            self._passed = max(self._passed, self._waiting.popleft()[0])


def _done() -> bool:
    return True
