"""What a client is told that is turned away at the door, and how long it took to tell."""

from __future__ import annotations

import time

from antiphon.router.admission import AdmissionTimeout, DeadlineTooClose, QueueFull, ShuttingDown
from antiphon.router.lifecycle import EndKind
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.ends import SHUTDOWN_RETRY_AFTER_S
from antiphon.router.openai.errors import ApiError, deadline_exceeded, rate_limited, unavailable

REFUSALS = (QueueFull, DeadlineTooClose, AdmissionTimeout, ShuttingDown)
"""What admission raises."""


def refusal_of(error: Exception) -> tuple[EndKind, ApiError]:
    """How a request ends that admission refused, and its error.

    Raises:
        TypeError: it is none of ``REFUSALS``.
    """
    match error:
        case QueueFull():
            full = rate_limited("The server is busy: its queue is full.", error.retry_after_s)
            return EndKind.OVERLOADED, full
        case DeadlineTooClose():
            late = unavailable(f"The request would miss its deadline: {error}.", error.retry_after_s)
            return EndKind.DEADLINE, late
        case AdmissionTimeout():
            return EndKind.DEADLINE, deadline_exceeded(f"The request did not start: {error}.")
        case ShuttingDown():
            return EndKind.SHUTDOWN, unavailable("The server is shutting down.", SHUTDOWN_RETRY_AFTER_S)
    raise TypeError(f"{type(error).__name__} is not a refusal")


def note_refusal(metrics: RouterMetrics, error: Exception, received_at: float) -> None:
    """Account for the time from arrival to refusal; who waited in vain was not refused at the door."""
    if not isinstance(error, AdmissionTimeout):
        metrics.refusal_time.observe(time.monotonic() - received_at)
