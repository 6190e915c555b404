"""What a prefill worker exports and records of its jobs: metrics, spans, log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from antiphon.configs.schema import DeploymentConfig
from antiphon.engine import metrics as engine_metrics
from antiphon.engine.loop import EngineLoop
from antiphon.kv_transfer import measured_transport
from antiphon.kv_transfer.measured_transport import TransferMetrics
from antiphon.prefill_worker.jobs import PrefillJob
from antiphon.protocol.identity import Role
from antiphon.protocol.status import WorkerStatus
from antiphon.telemetry import buckets, worker_status
from antiphon.telemetry.loop_metrics import LoopHistogram
from antiphon.telemetry.registry import PREFIX, ProcessRegistry
from antiphon.telemetry.trace_context import TraceContext
from antiphon.telemetry.tracing import Tracer, UnrecordedTracer
from antiphon.telemetry.worker_status import WorkerStatusCollector

_log = logging.getLogger(__name__)

VLLM_NAMES = {
    **engine_metrics.VLLM_NAMES,
    **measured_transport.VLLM_NAMES,
    **worker_status.VLLM_NAMES,
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_prefill_queue_seconds": ("request_queue_time_seconds",),
}


class PrefillMetrics:
    """One life of one prefill worker. ``job_*`` are called on the link thread."""

    def __init__(
        self,
        worker_id: str,
        config: DeploymentConfig,
        engine: EngineLoop,
        status: Callable[[], WorkerStatus],
        tracer: Tracer | None = None,
    ) -> None:
        vllm = config.metrics.compat == "vllm"
        labels = {"model_name": config.model.name, "role": Role.PREFILL.value, "engine": worker_id}
        self.registry = registry = ProcessRegistry(labels, vllm_names=VLLM_NAMES if vllm else None)
        self.engine = engine_metrics.EngineMetrics(
            registry, engine.settings, engine.snapshot, vllm_names=vllm
        )
        self.transfers = TransferMetrics(registry)
        self._worker_id = worker_id
        self._tracer = tracer or UnrecordedTracer()
        self._queue = self._histogram("prefill_queue_seconds", "Wait of a prompt for its first chunk.")
        self._compute = self._histogram("prefill_time_seconds", "First chunk of a prompt to its last.")
        self._tail = self._histogram(
            "transfer_tail_seconds", "Last chunk of a prompt to the end of its transfer."
        )
        self._tokens = LoopHistogram(
            f"{PREFIX}request_prefill_kv_computed_tokens",
            "Prompt tokens computed for a request, cached ones left out.",
            buckets.TOKENS,
            registry,
        )
        registry.register(WorkerStatusCollector(status))
        registry.declare_build(Role.PREFILL)

    def job_shipped(self, job: PrefillJob, tail_s: float) -> None:
        """Every page of a job has arrived."""
        tokens = job.request.ticket.kv_tokens
        self._queue.observe(job.queue_s)
        self._compute.observe(job.compute_s)
        self._tail.observe(tail_s)
        self._tokens.observe(max(0, tokens - job.cached_tokens))
        trace_id = self._trace(job, tail_s, None)
        _log.info(
            "prefill_shipped",
            extra={
                "request_id": job.request.request_id,
                "attempt": job.request.attempt,
                "trace_id": trace_id,
                "decode_worker": job.decode.worker_id,
                "prompt_tokens": tokens + 1,
                "cached_tokens": job.cached_tokens,
                "bytes": job.bytes_sent,
                "queue_s": round(job.queue_s, 6),
                "compute_s": round(job.compute_s, 6),
                "transfer_tail_s": round(tail_s, 6),
            },
        )

    def job_failed(self, job: PrefillJob, stage: str, reason: str) -> None:
        """A job will not complete."""
        trace_id = self._trace(job, job.transfer_tail_s() if job.computed else 0.0, f"{stage}: {reason}")
        _log.warning(
            "prefill_failed",
            extra={
                "request_id": job.request.request_id,
                "attempt": job.request.attempt,
                "trace_id": trace_id,
                "decode_worker": job.decode.worker_id,
                "stage": stage,
                "reason": reason,
            },
        )

    def _trace(self, job: PrefillJob, tail_s: float, error: str | None) -> str:
        """Spans of a job: the whole, and the transfer as a part of its own; returns the trace's id."""
        parent = TraceContext.parse(job.request.traceparent)
        if parent is None:
            return ""
        now = time.monotonic()
        whole = self._tracer.record(
            "prefill",
            parent,
            now - job.received_at,
            error=error,
            attributes={
                "antiphon.worker": self._worker_id,
                "antiphon.request_id": job.request.request_id,
                "antiphon.prompt_tokens": job.request.ticket.kv_tokens + 1,
                "antiphon.cached_tokens": job.cached_tokens,
                "antiphon.queue_s": job.queue_s,
                "antiphon.compute_s": job.compute_s,
            },
        )
        if job.announced:
            self._tracer.record(
                "kv_transfer",
                whole,
                now - job.announced_at,
                error=error,
                attributes={
                    "antiphon.decode_worker": job.decode.worker_id,
                    "antiphon.bytes": job.bytes_sent,
                    "antiphon.writes": len(job.done),
                    "antiphon.exposed_tail_s": tail_s,
                },
            )
        return parent.trace_id

    def _histogram(self, name: str, text: str) -> LoopHistogram:
        return LoopHistogram(f"{PREFIX}request_{name}", text, buckets.STAGE_S, self.registry)
