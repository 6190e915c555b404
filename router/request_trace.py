"""The spans of one generation: what the router did itself, and one span per attempt that workers continue."""

from __future__ import annotations

from antiphon.telemetry.trace_context import TraceContext
from antiphon.telemetry.tracing import NO_ATTRIBUTES, Attributes, Span, Tracer, UnrecordedTracer

TRACE = "antiphon.trace"
"""Key of the ASGI scope: the context of the request's own span."""
REQUEST_ID = "antiphon.request_id"
"""Key of the ASGI scope: the id that the client finds in ``x-request-id``."""


class GenerationTrace:
    """Continues a request's span. ``http_request_id`` is what log lines of the request carry."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        context: TraceContext | None = None,
        *,
        http_request_id: str = "",
    ) -> None:
        self._tracer = tracer or UnrecordedTracer()
        self.context = context or TraceContext.new()
        self.http_request_id = http_request_id
        self._attempt: int | None = None
        self._attempts = 0
        self._span: Span | None = None
        self._workers: dict[str, str] = {}

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What ties an observation to this trace; None when nobody records it."""
        return {"trace_id": self.context.trace_id} if self.context.sampled else None

    def attempt(self, attempt: int) -> str:
        """The ``traceparent`` of an attempt, whose span begins at the first call."""
        if self._span is None or attempt != self._attempt:
            self._end_attempt(None)
            self._attempt, self._attempts = attempt, self._attempts + 1
            about = {"antiphon.attempt": attempt, "antiphon.attempts": self._attempts}
            self._span = self._tracer.start("attempt", self.context, attributes=about)
        return self._span.context.header()

    def placed(self, leg: str, worker_id: str) -> None:
        """A worker was chosen for a leg of the present attempt."""
        self._workers[f"antiphon.{leg}_worker"] = worker_id

    def attempt_failed(self, reason: str) -> None:
        """The present attempt ended without its answer being whole."""
        self._end_attempt(reason)

    def record(self, name: str, seconds: float, ended_s_ago: float) -> None:
        """A part of the request that the router did itself."""
        self._tracer.record(name, self.context, seconds, ended_s_ago=ended_s_ago)

    def ended(self, kind: str, error: str | None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """The generation has ended."""
        self._end_attempt(error, {"antiphon.end": kind, **attributes})

    def _end_attempt(self, error: str | None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        span, self._span = self._span, None
        workers, self._workers = self._workers, {}
        if span is not None:
            span.end(error=error, attributes={**workers, **attributes})
