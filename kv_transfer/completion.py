"""Completion sets: the writes a receiver expects, ticked off as their notifications arrive.

A set is complete when every announced write was notified, never when one message says so. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from antiphon.protocol.kv_messages import WriteKey


class Tick(Enum):
    """What a notification meant to a set."""

    NEW = "new"
    REPEATED = "repeated"
    UNKNOWN = "unknown"
    """Not a write that was announced."""


class CompletionSet:
    """The writes of one request and attempt, with a deadline that progress renews."""

    def __init__(self, keys: Iterable[WriteKey], timeout_s: float, now: float) -> None:
        """Raises ValueError for an empty set: with nothing to write there is nothing to complete."""
        self._expected = frozenset(keys)
        if not self._expected:
            raise ValueError("a completion set needs at least one write")
        self._missing = set(self._expected)
        self._parts: dict[WriteKey, set[int]] = {}
        """Parts that have come of writes of which others are still missing."""
        self._timeout_s = timeout_s
        self._progress_at = now
        self.times_asked = 0
        """How often the missing writes were asked for since the last progress."""

    @property
    def complete(self) -> bool:
        """Every announced write was notified."""
        return not self._missing

    @property
    def expected(self) -> frozenset[WriteKey]:
        """All announced writes."""
        return self._expected

    def missing(self) -> list[WriteKey]:
        """Writes without a notification so far, in order."""
        return sorted(self._missing)

    def tick(self, key: WriteKey, now: float, part: int = 0, parts: int = 1) -> Tick:
        """Note a notification: of a whole write, or of one of its parts."""
        if key not in self._expected:
            return Tick.UNKNOWN
        if key not in self._missing:
            return Tick.REPEATED
        if parts > 1:
            known = self._parts.setdefault(key, set())
            if part in known:
                return Tick.REPEATED
            known.add(part)
            if len(known) < parts:
                self.renew(now)
                return Tick.NEW
        self._parts.pop(key, None)
        self._missing.remove(key)
        self.renew(now)
        return Tick.NEW

    def renew(self, now: float) -> None:
        """The writer showed that it is still at work."""
        self._progress_at = now
        self.times_asked = 0

    def overdue(self, now: float) -> bool:
        """Whether the set made no progress for its timeout; each asking buys one timeout more."""
        waited = now - self._progress_at
        return not self.complete and waited > self._timeout_s * (1 + self.times_asked)
