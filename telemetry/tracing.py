"""The tracing seam: spans of a request, in every process that works on it.

``otel.py`` records and exports them; without an exporter ``UnrecordedTracer`` hands contexts through, so that
every process still knows which trace it works for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from antiphon.telemetry.trace_context import TraceContext

Attributes = Mapping[str, str | int | float | bool]
NO_ATTRIBUTES: Attributes = {}


class Span(Protocol):
    """A span that has begun. ``context`` is what its children and other processes continue from."""

    @property
    def context(self) -> TraceContext:
        """Names this span."""
        ...

    def end(self, *, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """End it now; ``error`` says why what it stands for failed."""
        ...


class Tracer(Protocol):
    """Makes spans of one process. Safe from any thread."""

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        server: bool = False,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Begin a span; without a parent it begins a trace. ``server``: it answers a remote caller."""
        ...

    def record(
        self,
        name: str,
        parent: TraceContext,
        seconds: float,
        *,
        ended_s_ago: float = 0.0,
        error: str | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> TraceContext:
        """Add a span of something that is over already; returns its context, for children."""
        ...

    def close(self) -> None:
        """Send what has not been sent."""
        ...


@dataclass(frozen=True, slots=True)
class UnrecordedSpan:
    """Stands for a span that nobody records."""

    context: TraceContext

    def end(self, *, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Nothing."""


class UnrecordedTracer:
    """Passes contexts on as they are; a request that comes without one gets a trace of its own."""

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        server: bool = False,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> UnrecordedSpan:
        """See Tracer."""
        return UnrecordedSpan(parent or TraceContext.new())

    def record(
        self,
        name: str,
        parent: TraceContext,
        seconds: float,
        *,
        ended_s_ago: float = 0.0,
        error: str | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> TraceContext:
        """See Tracer."""
        return parent

    def close(self) -> None:
        """Nothing."""


def make_tracer(process: str, role: str, otlp_endpoint: str | None, sample_ratio: float) -> Tracer:
    """The tracer of a process; without ``otlp_endpoint`` one that records nothing.

    Args:
        otlp_endpoint: base URL of an OTLP/HTTP receiver, e.g. ``http://collector:4318``.
        sample_ratio: share of requests that are recorded among those whose caller did not decide.
    """
    if otlp_endpoint is None:
        return UnrecordedTracer()
    from antiphon.telemetry.otel import OtelTracer  # loads the SDK

    return OtelTracer(process, role, otlp_endpoint, sample_ratio)
