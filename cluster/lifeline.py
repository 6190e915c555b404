"""The end of a process that its supervisor cannot reach: it ends itself.

A worker whose links to Ray are cut cannot be killed, though it may still write its peers' pages. So each of
its ranks counts how long nobody has asked for it, and whoever gave it up waits for that long before its pages
are used again, when nothing else proves that it is gone.

A rank may be stuck in a call that never returns and lets no other thread of Python run, such as a launch
behind kernels that wait for a rank that died. The system's alarm clock ends what does not end itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("antiphon.lifeline")

LIFELINE_LEASES = 3
"""Leases after which a process that was not asked ends. A supervisor that is slow for less ends nobody."""
EXIT_STATUS = 70
ALARM_SHARE = 1.1
"""The alarm clock goes off this much later than the process should have ended itself, which says why. That is
less than the lease that ``gone_after_s`` adds."""


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
    """Ends this process when ``asked`` is not called for ``limit_s``; begins with the first call.

    Args:
        end: does so instead, for tests; then the alarm clock, of which a process has one, is left alone.
    """

    def __init__(self, limit_s: float, end: Callable[[], None] | None = None) -> None:
        self._limit_s = limit_s
        self._end = end or _exit
        self._sets_alarm = end is None
        self._asked_at: float | None = None
        self._cut = False

    def asked(self) -> None:
        """Somebody watches over this process."""
        if self._cut:
            return
        begins = self._asked_at is None
        self._asked_at = time.monotonic()
        self._set_alarm(self._limit_s)
        if begins:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def cut(self, grace_s: float) -> None:
        """End this process after ``grace_s``, whoever asks for it: it is of no use any more."""
        self._cut = True
        self._set_alarm(grace_s)
        last = threading.Timer(grace_s, self._end)
        last.daemon = True
        last.start()

    def _set_alarm(self, seconds: float) -> None:
        if self._sets_alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds * ALARM_SHARE)

    def _watch(self) -> None:
        while self._asked_at is not None and not self._cut:
            left_s = self._asked_at + self._limit_s - time.monotonic()
            if left_s <= 0:
                log.error("nobody asks for this process any more", after_s=self._limit_s)
                self._end()
                return
            time.sleep(left_s)
