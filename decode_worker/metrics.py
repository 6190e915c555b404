"""What a decode worker exports and records of its requests: metrics, spans, log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.requests import DecodeRequest
from antiphon.engine import metrics as engine_metrics
from antiphon.engine.events import SequenceFinished
from antiphon.engine.loop import EngineLoop
from antiphon.protocol.identity import Role
from antiphon.protocol.messages import FinishReason
from antiphon.protocol.status import WorkerStatus
from antiphon.telemetry import buckets, worker_status
from antiphon.telemetry.loop_metrics import LoopHistogram
from antiphon.telemetry.registry import PREFIX, ProcessRegistry
from antiphon.telemetry.trace_context import TraceContext
from antiphon.telemetry.tracing import Attributes, Tracer, UnrecordedTracer
from antiphon.telemetry.worker_status import WorkerStatusCollector

_log = logging.getLogger(__name__)
_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)

VLLM_NAMES = {
    **engine_metrics.VLLM_NAMES,
    **worker_status.VLLM_NAMES,
    "request_decode_time_seconds": ("request_decode_time_seconds",),
}


class DecodeMetrics:
    """One life of one decode worker. Everything but ``engine`` is called on the link thread."""

    def __init__(
        self,
        worker_id: str,
        config: DeploymentConfig,
        engine: EngineLoop,
        status: Callable[[], WorkerStatus],
        tracer: Tracer | None = None,
    ) -> None:
        vllm = config.metrics.compat == "vllm"
        labels = {"model_name": config.model.name, "role": Role.DECODE.value, "engine": worker_id}
        self.registry = registry = ProcessRegistry(labels, vllm_names=VLLM_NAMES if vllm else None)
        self.engine = engine_metrics.EngineMetrics(
            registry, engine.settings, engine.snapshot, vllm_names=vllm
        )
        self._worker_id = worker_id
        self._tracer = tracer or UnrecordedTracer()
        self._reserve = self._histogram("reserve_seconds", "Wait of a request for its pages.")
        self._receive = self._histogram(
            "kv_receive_seconds", "Permission to write to the last page's arrival."
        )
        self._first_step = self._histogram("first_step_seconds", "KV complete to the first token.")
        self._decode = self._histogram("decode_time_seconds", "First token to the end.")
        registry.register(WorkerStatusCollector(status))
        registry.declare_build(Role.DECODE)

    def reserved(self, request: DecodeRequest, wait_s: float) -> None:
        """Pages are held."""
        self._reserve.observe(wait_s)
        self._record(request, "reserve", wait_s)

    def kv_received(self, request: DecodeRequest, seconds: float) -> None:
        """Every announced write has arrived."""
        self._receive.observe(seconds)
        self._record(request, "kv_receive", seconds)

    def first_tokens(self, request: DecodeRequest, seconds: float) -> None:
        """An attempt's first tokens were sampled, so long after its KV was complete."""
        self._first_step.observe(seconds)
        self._record(request, "first_step", seconds)

    def finished(self, request: DecodeRequest, event: SequenceFinished) -> None:
        """The engine has ended a request."""
        if event.decode_s:
            self._decode.observe(event.decode_s)
        error = None if event.reason in _GOOD_ENDS else event.error or event.reason.value
        if event.decode_s:
            self._record(request, "decode", event.decode_s, error=error)
        parent = TraceContext.parse(request.message.traceparent)
        level = logging.INFO if error is None else logging.WARNING
        _log.log(
            level,
            "decode_finished",
            extra={
                "request_id": event.request_id,
                "attempt": event.attempt,
                "trace_id": parent.trace_id if parent is not None else "",
                "reason": event.reason.value,
                "error": event.error,
                "output_tokens": len(request.emitted),
                "preemptions": event.preemptions,
                "held_s": round(time.monotonic() - request.received_at, 6),
                "transfer_s": round(request.transfer_s, 6),
                "decode_s": round(event.decode_s, 6),
            },
        )

    def _record(self, request: DecodeRequest, name: str, seconds: float, *, error: str | None = None) -> None:
        parent = TraceContext.parse(request.message.traceparent)
        if parent is not None and parent.sampled:
            about: Attributes = {
                "antiphon.worker": self._worker_id,
                "antiphon.request_id": request.message.request_id,
                "antiphon.attempt": request.attempt,
            }
            self._tracer.record(name, parent, seconds, error=error, attributes=about)

    def _histogram(self, name: str, text: str) -> LoopHistogram:
        return LoopHistogram(f"{PREFIX}request_{name}", text, buckets.STAGE_S, self.registry)
