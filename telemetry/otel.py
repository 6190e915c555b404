"""Spans recorded by OpenTelemetry's SDK and exported through OTLP over HTTP; the one file that imports it."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from antiphon import __version__
from antiphon.telemetry.trace_context import TraceContext
from antiphon.telemetry.tracing import NO_ATTRIBUTES, Attributes

EXPORT_INTERVAL_MS = 500.0
"""A process that is killed takes along the spans of about so long."""
EXPORT_TIMEOUT_S = 5.0


class OtelSpan:
    """See Span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._context = _ours(span.get_span_context())

    @property
    def context(self) -> TraceContext:
        """See Span."""
        return self._context

    def end(self, *, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """See Span."""
        _finish(self._span, time.time_ns(), error, attributes)


class OtelTracer:
    """See Tracer. ``process`` names this process of the deployment, such as ``decode-0``."""

    def __init__(self, process: str, role: str, otlp_endpoint: str, sample_ratio: float) -> None:
        resource = Resource.create(
            {
                "service.name": f"antiphon-{role}",
                "service.version": __version__,
                "service.instance.id": process,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{otlp_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MS)
        )
        self._tracer = self._provider.get_tracer("antiphon")

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        server: bool = False,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> OtelSpan:
        """See Tracer."""
        kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
        return OtelSpan(
            self._tracer.start_span(name, _theirs(parent), kind=kind, attributes=dict(attributes))
        )

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
        if not parent.sampled:
            return parent
        end = time.time_ns() - int(ended_s_ago * 1e9)
        span = self._tracer.start_span(
            name, _theirs(parent), attributes=dict(attributes), start_time=end - int(seconds * 1e9)
        )
        _finish(span, end, error, NO_ATTRIBUTES)
        return _ours(span.get_span_context())

    def close(self) -> None:
        """See Tracer."""
        self._provider.shutdown()


def _finish(span: trace.Span, end_ns: int, error: str | None, attributes: Attributes) -> None:
    if attributes:
        span.set_attributes(dict(attributes))
    if error is not None:
        span.set_status(trace.StatusCode.ERROR, error)
    span.end(end_ns)


def _ours(context: trace.SpanContext) -> TraceContext:
    return TraceContext(
        trace.format_trace_id(context.trace_id),
        trace.format_span_id(context.span_id),
        context.trace_flags.sampled,
    )


def _theirs(parent: TraceContext | None) -> Context:
    """Without a parent an empty context: nothing is taken from the thread."""
    if parent is None:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
    span_context = trace.SpanContext(
        int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(span_context), Context())
