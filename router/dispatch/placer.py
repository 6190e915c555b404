"""Puts generations on workers, keeps those that must wait for one, and starts attempts over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from antiphon.configs.front_end import RouterConfig
from antiphon.protocol.identity import Role
from antiphon.router.dispatch.generation import Generation
from antiphon.router.dispatch.legs import Legs, Placed
from antiphon.router.dispatch.open_generations import OpenGenerations
from antiphon.router.lifecycle import EndKind, GenerationState
from antiphon.router.metrics import RouterMetrics

log = structlog.get_logger("antiphon.router.dispatch")

PREFILL_FULL_RETRY_S = 0.05
"""A reservation whose prefill workers were all full asks again after this long."""
NO_WORKER_RETRY_AFTER_S = 5.0
OVERLOADED_RETRY_AFTER_S = 1.0


class Placer:
    """Owns the generations that are parked until a worker can take them."""

    def __init__(
        self, legs: Legs, generations: OpenGenerations, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._legs = legs
        self._generations = generations
        self._config = config
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._parked: dict[str, Generation] = {}

    def place(self, generation: Generation) -> None:
        """Ask a decode worker to take the generation; without one, a new one ends and a begun one waits."""
        match self._legs.place_decode(generation):
            case Placed.SENT:
                generation.move(GenerationState.RESERVING)
            case Placed.ALL_REFUSED if not generation.failures:
                detail = "every decode worker is full"
                self._generations.end(generation, EndKind.OVERLOADED, detail, OVERLOADED_RETRY_AFTER_S)
            case Placed.NO_WORKER if not generation.failures:
                detail = "no ready pair of a prefill and a decode worker"
                self._generations.end(generation, EndKind.NO_WORKER, detail, NO_WORKER_RETRY_AFTER_S)
            case _:
                self._park(generation)

    def place_prefill(self, generation: Generation) -> None:
        """Ask a prefill worker to fill the pages that decode holds for the generation."""
        if generation.state is not GenerationState.PREFILLING:
            return
        self._generations.cancel_wait(generation)
        match self._legs.place_prefill(generation):
            case Placed.SENT:
                return
            case Placed.ALL_REFUSED:
                generation.refused_by.clear()
                generation.wait_timer = self._loop.call_later(
                    PREFILL_FULL_RETRY_S, self.place_prefill, generation
                )
            case Placed.NO_WORKER:
                self.retry(generation, Role.PREFILL, "no_worker")

    def retry(self, generation: Generation, leg: Role, reason: str) -> None:
        """Start the next attempt with everything emitted so far, or give up."""
        log.warning(
            "attempt_failed",
            request_id=generation.request_id,
            attempt=generation.attempt,
            leg=leg,
            reason=reason,
            state=generation.state,
            emitted=len(generation.output_token_ids),
        )
        self._generations.cancel_wait(generation)
        if not self.count_failure(generation, leg, reason):
            return
        self._legs.abort(generation, reason)
        generation.next_attempt()
        generation.refused_by.clear()
        generation.move(GenerationState.PLACING)
        self.place(generation)

    def retry_all(self, request_ids: Iterable[str], worker_id: str, role: Role, reason: str) -> None:
        """Start over what a worker held."""
        for request_id in list(request_ids):
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            if generation.closing is not None:
                self._generations.end(generation, generation.closing)
            elif worker_id == generation.prefill_worker_id and generation.has_its_kv:
                generation.prefill_worker_id = None
            elif worker_id in (generation.decode_worker_id, generation.prefill_worker_id):
                self.retry(generation, role, reason)

    def count_failure(self, generation: Generation, leg: Role, reason: str) -> bool:
        """Note a failed attempt; False when it was the last, and the generation has ended."""
        generation.trace.attempt_failed(f"{leg}: {reason}")
        generation.failures += 1
        if generation.failures >= self._config.max_attempts:
            detail = f"{leg} failed in {generation.failures} attempts, the last time with: {reason}"
            self._generations.abandon(generation, EndKind.FAILED, detail)
            return False
        self._metrics.retries.labels(leg, reason).inc()
        return True

    def unpark(self) -> None:
        """Something changed about the workers: try what waits."""
        waiting, self._parked = self._parked, {}
        for generation in waiting.values():
            if generation.end is not None:
                continue
            generation.refused_by.clear()
            self.place(generation)
            if generation.state is GenerationState.RESERVING:
                self._generations.cancel_wait(generation)

    def _park(self, generation: Generation) -> None:
        self._parked[generation.request_id] = generation
        if generation.wait_timer is None:
            generation.wait_timer = self._loop.call_later(
                self._config.worker_replacement_wait_s,
                self._generations.abandon,
                generation,
                EndKind.NO_WORKER,
                "the worker died and no other took over",
            )
