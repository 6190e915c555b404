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
            generation.timings.first_token_s = now - generation.received_at
            self._metrics.time_to_first_token.observe(generation.timings.first_token_s)
        else:
            self._metrics.inter_token_latency.observe((now - generation.last_token_at) / count)
        generation.last_token_at = now
        self._metrics.generation_tokens.inc(count)

    def ended(self, generation: Generation, kind: EndKind, stage: GenerationState, now: float) -> None:
        """The generation ended while in ``stage``."""
        metrics, timings = self._metrics, generation.timings
        parts = {
            "queue": timings.queue_s,
            "route": timings.route_s,
            "reserve": timings.reserve_s,
            "prefill_queue": timings.prefill_queue_s,
            "prefill": timings.prefill_s,
            "transfer": timings.transfer_s,
            "first_decode": timings.first_decode_s,
        }
        for name, seconds in parts.items():
            if seconds is not None:
                metrics.stage_duration.labels(name).observe(seconds)
        if timings.queue_s is not None:
            metrics.queue_time.observe(timings.queue_s)
        metrics.e2e_latency.observe(now - generation.received_at)
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
            kind=kind,
            stage=stage,
            failures=generation.failures,
            workers=generation.workers_used,
            prompt_tokens=len(generation.prompt_token_ids),
            cached_tokens=generation.cached_tokens,
            output_tokens=len(generation.output_token_ids),
            first_token_s=timings.first_token_s,
            total_s=round(now - generation.received_at, 6),
            **{f"{name}_s": round(seconds, 6) for name, seconds in parts.items() if seconds is not None},
        )
