"""Keep work away from a worker that fails repeatedly, and try it again after a while."""

from __future__ import annotations

from enum import IntEnum


class CircuitState(IntEnum):
    """The value is the metric's."""

    CLOSED = 0
    """Work flows."""
    OPEN = 1
    """No work until the pause is over."""
    HALF_OPEN = 2
    """One request is on trial."""


class Circuit:
    """Opens after ``failures_to_open`` failures in a row; after ``pause_s`` one trial request decides.

    Times are readings of one monotonic clock of this process, in seconds.
    """

    def __init__(self, failures_to_open: int = 3, pause_s: float = 5.0) -> None:
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._failures = 0
        self._opened_at: float | None = None
        self._trial_since: float | None = None

    def state(self, now: float) -> CircuitState:
        """Where the circuit stands."""
        if self._opened_at is None:
            return CircuitState.CLOSED
        return CircuitState.HALF_OPEN if now - self._opened_at >= self._pause_s else CircuitState.OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent; a query, it reserves nothing."""
        match self.state(now):
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                return False
            case CircuitState.HALF_OPEN:
                # A trial that never reports back must not keep the worker out for ever.
                return self._trial_since is None or now - self._trial_since >= self._pause_s

    def sent(self, now: float) -> None:
        """A request went out; in the half-open state it is the trial."""
        if self.state(now) is CircuitState.HALF_OPEN:
            self._trial_since = now

    def succeeded(self) -> None:
        """The worker did what it was asked to."""
        self._failures = 0
        self._opened_at = self._trial_since = None

    def failed(self, now: float) -> None:
        """The worker did not."""
        self._failures += 1
        if self._failures >= self._failures_to_open:
            self._opened_at = now
            self._trial_since = None
