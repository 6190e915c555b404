"""The two legs of a generation: asking a decode worker for pages, and a prefill worker for KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

import structlog

from antiphon.protocol.messages import AbortRequest, GenerateRequest, Message, PrefillRequest
from antiphon.router.dispatch.fleet import Fleet
from antiphon.router.dispatch.gateway import WorkerBacklogged, WorkerGateway, WorkerUnreachable
from antiphon.router.dispatch.generation import ATTEMPT_STRIDE, Generation
from antiphon.router.dispatch.placement import (
    DecodeCandidate,
    Placement,
    PlacementReason,
    choose_decode,
    choose_prefill,
)
from antiphon.router.metrics import RouterMetrics

log = structlog.get_logger("antiphon.router.dispatch")

RETRY_PRIORITY_BOOST = 1 << 20
"""Subtracted from the priority of a recompute, so that it runs before every first attempt."""


class Placed(Enum):
    """What became of placing a leg."""

    SENT = "sent"
    ALL_REFUSED = "all refused"
    """There are workers, and each of them has refused this leg."""
    NO_WORKER = "no worker"


class Legs:
    """Chooses workers for a generation's legs and talks to them. Keeps no state but the fleet's."""

    def __init__(self, gateway: WorkerGateway, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._metrics = metrics

    def place_decode(self, generation: Generation) -> Placed:
        """Choose a decode worker and ask it to reserve pages."""
        generation.timings.attempt_began(time.monotonic())
        tokens = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        pages = self._fleet.pages_for(tokens + 1)
        while True:
            now = time.monotonic()
            keys = generation.prefix_keys
            candidates = self._fleet.decode_candidates(keys, generation.refused_by, now)
            choice = _beside_first_choice(generation, candidates) or choose_decode(candidates, pages)
            if choice is None:
                any_worker = bool(self._fleet.decode_candidates(keys, (), now))
                return Placed.ALL_REFUSED if any_worker else Placed.NO_WORKER
            message = self._generate_request(generation, now, choice.reason)
            if self._ask(choice.worker_id, generation, message, now):
                break
        generation.decode_worker_id = choice.worker_id
        generation.workers_used.append(choice.worker_id)
        self._fleet.assign(choice.worker_id, generation.request_id, now, pages=pages)
        self._note_choice(generation, "decode", choice.worker_id, choice.reason)
        generation.timings.decode_asked(time.monotonic())
        return Placed.SENT

    def place_prefill(self, generation: Generation) -> Placed:
        """Choose a prefill worker for the generation's ticket and send it the tokens."""
        ticket = generation.ticket
        decode_id = generation.decode_worker_id
        if ticket is None or decode_id is None:
            raise ValueError(f"{generation.request_id} holds no ticket")
        token_ids = generation.all_token_ids()[: ticket.kv_tokens + 1]
        while True:
            now = time.monotonic()
            keys = generation.prefix_keys
            choice = choose_prefill(
                self._fleet.prefill_candidates(decode_id, keys, generation.refused_by, now), len(token_ids)
            )
            if choice is None:
                any_worker = bool(self._fleet.prefill_candidates(decode_id, keys, (), now))
                return Placed.ALL_REFUSED if any_worker else Placed.NO_WORKER
            message = PrefillRequest(
                request_id=generation.request_id,
                attempt=generation.attempt,
                token_ids=token_ids,
                ticket=ticket,
                priority=self._priority(generation),
                deadline_s=max(generation.deadline_at - now, 0.0),
                cache_salt=generation.cache_salt,
                traceparent=generation.trace.attempt(generation.attempt),
            )
            if self._ask(choice.worker_id, generation, message, now):
                break
        generation.prefill_worker_id = choice.worker_id
        generation.workers_used.append(choice.worker_id)
        self._fleet.assign(choice.worker_id, generation.request_id, now, tokens=len(token_ids))
        self._note_choice(generation, "prefill", choice.worker_id, choice.reason)
        generation.timings.prefill_asked(time.monotonic())
        return Placed.SENT

    def abort(self, generation: Generation, reason: str) -> None:
        """Tell every worker that holds a leg to stop, and forget them."""
        # Up to the last attempt that the workers can have begun by themselves.
        last = (generation.attempt // ATTEMPT_STRIDE + 1) * ATTEMPT_STRIDE - 1
        self.drop_prefill(generation, reason, last)
        if generation.decode_worker_id is not None:
            self._abort_at(generation.decode_worker_id, generation, last, reason)
            generation.decode_worker_id = None
        generation.ticket = None

    def drop_prefill(self, generation: Generation, reason: str, attempt: int) -> None:
        """Tell the prefill worker to stop working on attempts up to this one, and forget it."""
        if generation.prefill_worker_id is not None:
            self._abort_at(generation.prefill_worker_id, generation, attempt, reason)
            generation.prefill_worker_id = None

    def _abort_at(self, worker_id: str, generation: Generation, attempt: int, reason: str) -> None:
        # A worker that cannot be reached hears nothing and needs nothing: its lease on us ends too.
        self._send(worker_id, AbortRequest(generation.request_id, attempt, reason))
        self._fleet.release(worker_id, generation.request_id)

    def _ask(
        self, worker_id: str, generation: Generation, message: GenerateRequest | PrefillRequest, now: float
    ) -> bool:
        """Send what begins a leg; whether it went. A worker it cannot go to counts as one that refused it."""
        try:
            if self._send(worker_id, message):
                return True
            self._fleet.failed(worker_id, now)
        except WorkerBacklogged as error:
            log.warning("worker_backlogged", worker=worker_id, error=str(error))
        generation.refused_by.add(worker_id)
        return False

    def _send(self, worker_id: str, message: Message) -> bool:
        if self._fleet.get(worker_id) is None:
            return False
        try:
            self._gateway.send(worker_id, message)
        except WorkerUnreachable as error:
            log.warning(
                "worker_unreachable", worker=worker_id, message=type(message).__name__, error=str(error)
            )
            return False
        return True

    def _generate_request(
        self, generation: Generation, now: float, reason: PlacementReason
    ) -> GenerateRequest:
        first = generation.first_choice if reason is PlacementReason.FIRST_CHOICE else None
        return GenerateRequest(
            request_id=generation.request_id,
            attempt=generation.attempt,
            prompt_token_ids=generation.prompt_token_ids,
            output_token_ids=list(generation.output_token_ids),
            sampling=generation.sampling,
            priority=self._priority(generation),
            deadline_s=max(generation.deadline_at - now, 0.0),
            cache_salt=generation.cache_salt,
            grammar=generation.grammar,
            fork_of="" if first is None else first.request_id,
            traceparent=generation.trace.attempt(generation.attempt),
        )

    def _priority(self, generation: Generation) -> int:
        return generation.priority - (RETRY_PRIORITY_BOOST if generation.recomputes else 0)

    def _note_choice(self, generation: Generation, leg: str, worker_id: str, reason: str) -> None:
        self._metrics.disagg_decisions.labels(leg, reason).inc()
        generation.trace.placed(leg, worker_id)
        log.debug(
            "placed",
            request_id=generation.request_id,
            attempt=generation.attempt,
            leg=leg,
            worker=worker_id,
            reason=reason,
        )


def _beside_first_choice(generation: Generation, candidates: Sequence[DecodeCandidate]) -> Placement | None:
    """Where the first choice of the same prompt is; an attempt after a failure stands on its own."""
    first = generation.first_choice
    if first is None or generation.attempt or first.end is not None:
        return None
    there = any(candidate.worker_id == first.decode_worker_id for candidate in candidates)
    if not there or first.decode_worker_id is None:
        return None
    return Placement(first.decode_worker_id, PlacementReason.FIRST_CHOICE)
