"""What is counted and logged about a generation's tokens and its end."""

from __future__ import annotations

import structlog

from antiphon.router.dispatch.generation import Generation
from antiphon.router.lifecycle import EndKind, GenerationState
from antiphon.router.metrics import RouterMetrics

log = structlog.get_logger("antiphon.router.dispatch")

_CLIENT_LEFT = (EndKind.CLIENT_GONE, EndKind.SLOW_CLIENT)


class Accounts:
    """Turns the events of a generation into metrics and one log line."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def tokens_arrived(self, generation: Generation, count: int, now: float) -> None:
        """``count`` new tokens came; called before they are delivered."""
        if generation.last_token_at is None:
            generation.timings.first_token_at = now
            self._metrics.time_to_first_token.observe(now - generation.received_at, generation.trace.exemplar)
        else:
            self._metrics.inter_token_latency.observe((now - generation.last_token_at) / count)
        generation.last_token_at = now
        self._metrics.output_tokens.inc(count)

    def ended(self, generation: Generation, kind: EndKind, stage: GenerationState, now: float) -> None:
        """The generation ended while in ``stage``."""
        metrics, trace = self._metrics, generation.trace
        parts = generation.timings.parts(generation.received_at)
        for name, seconds in parts.items():
            metrics.stage_duration.labels(name).observe(seconds, trace.exemplar)
        if "queue" in parts:
            metrics.queue_time.observe(parts["queue"])
        metrics.e2e_latency.observe(now - generation.received_at, trace.exemplar)
        self._observe_decoding(generation)
        self._trace(generation, kind, now)
        first_token_at = generation.timings.first_token_at
        ttft_s = None if first_token_at is None else first_token_at - generation.received_at
        if kind in (EndKind.STOP, EndKind.LENGTH):
            metrics.finished.labels(kind).inc()
            metrics.prompt_tokens_per_request.observe(len(generation.prompt_token_ids))
            metrics.generation_tokens_per_request.observe(len(generation.output_token_ids))
        elif kind in _CLIENT_LEFT:
            metrics.client_disconnects.labels(stage).inc()
        metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        metrics.cached_tokens.inc(generation.cached_tokens)
        log.info(
            "generation_ended",
            request_id=generation.request_id,
            http_request_id=trace.http_request_id,
            trace_id=trace.context.trace_id,
            kind=kind,
            stage=stage,
            failures=generation.failures,
            workers=generation.workers_used,
            prompt_tokens=len(generation.prompt_token_ids),
            cached_tokens=generation.cached_tokens,
            output_tokens=len(generation.output_token_ids),
            first_token_s=None if ttft_s is None else round(ttft_s, 6),
            total_s=round(now - generation.received_at, 6),
            **{f"{name}_s": round(seconds, 6) for name, seconds in parts.items()},
        )

    def _observe_decoding(self, generation: Generation) -> None:
        first, last = generation.timings.first_token_at, generation.last_token_at
        tokens = len(generation.output_token_ids)
        if first is not None and last is not None and tokens > 1:
            self._metrics.time_per_output_token.observe(
                (last - first) / (tokens - 1), generation.trace.exemplar
            )

    @staticmethod
    def _trace(generation: Generation, kind: EndKind, now: float) -> None:
        trace, timings = generation.trace, generation.timings
        begin = generation.received_at
        for name, end in (("tokenize", timings.rendered_at), ("queue", timings.admitted_at)):
            if end is not None:
                trace.record(name, end - begin, now - end)
                begin = end
        well = kind in (EndKind.STOP, EndKind.LENGTH)
        tokens = len(generation.output_token_ids)
        trace.ended(kind, None if well else str(kind), {"antiphon.output_tokens": tokens})
