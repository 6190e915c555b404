"""The end of a process that its supervisor cannot reach: it ends itself.

A worker whose links to Ray are cut cannot be killed, though it may still write its peers' pages. So it counts
how long nobody has asked for its status, and whoever gave it up waits for that long before its pages are used
again, when nothing else proves that it is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("antiphon.lifeline")

LIFELINE_LEASES = 3
"""Leases after which a process that was not asked ends. A supervisor that is slow for less ends nobody."""
EXIT_STATUS = 70


def lifeline_s(lease_s: float) -> float:
    """How long a process lives on after it was last asked, at most."""
    return LIFELINE_LEASES * lease_s


def gone_after_s(lease_s: float) -> float:
    """How long after its last question a process is gone for certain.

    A lease more: the question may have reached it late, and it may be slow to notice that no other came.
    """
    return lifeline_s(lease_s) + lease_s


def _exit() -> None:
    os._exit(EXIT_STATUS)  # nothing is to be finished: it counts as dead already


class Lifeline:
    """Ends this process when ``asked`` is not called for ``limit_s``; begins with the first call."""

    def __init__(self, limit_s: float, end: Callable[[], None] = _exit) -> None:
        self._limit_s = limit_s
        self._end = end
        self._asked_at: float | None = None

    def asked(self) -> None:
        """Somebody watches over this process."""
        begins = self._asked_at is None
        self._asked_at = time.monotonic()
        if begins:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        while self._asked_at is not None:
            left_s = self._asked_at + self._limit_s - time.monotonic()
            if left_s <= 0:
                log.error("nobody asks for this process any more", after_s=self._limit_s)
                self._end()
                return
            time.sleep(left_s)
