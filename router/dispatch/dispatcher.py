"""Runs generations over the fleet: from admission to the one end of each, through refusals and deaths.

Everything happens on the router's event loop, in callbacks that do not wait. A generation that loses a
worker goes back to placement with its emitted tokens and the next attempt number, so the client sees neither
a gap nor a repeat.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from antiphon.configs.front_end import RouterConfig
from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.messages import (
    Finish,
    FinishReason,
    LoadReport,
    PrefillFailed,
    PrefillFinished,
    RequestRefused,
    Reserved,
    TokenBatch,
    TokenOutput,
    TokensAck,
)
from antiphon.router.dispatch.fleet import Fleet
from antiphon.router.dispatch.gateway import WorkerGateway, WorkerMessage, WorkerUnreachable
from antiphon.router.dispatch.generation import Generation
from antiphon.router.dispatch.legs import Legs
from antiphon.router.dispatch.open_generations import OpenGenerations
from antiphon.router.dispatch.placer import Placer
from antiphon.router.dispatch.prefix_index import page_keys
from antiphon.router.lifecycle import EndKind, GenerationState
from antiphon.router.metrics import RouterMetrics

log = structlog.get_logger("antiphon.router.dispatch")

PREFILL_REPORT_WAIT_S = 0.25
"""A generation that ended before its prefill worker's report waits this long for it, for exact usage."""


class Dispatcher:
    """Owns every generation between admission and its end. Implements ``GatewayListener``."""

    def __init__(
        self, gateway: WorkerGateway, config: RouterConfig, page_size_tokens: int, metrics: RouterMetrics
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._page_size_tokens = page_size_tokens
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.fleet = Fleet(metrics, page_size_tokens)
        self._legs = Legs(gateway, self.fleet, metrics)
        self._generations = OpenGenerations(self._legs, self.fleet, metrics)
        self._placer = Placer(self._legs, self._generations, config, metrics)
        self._last_batch: dict[str, int] = {}

    # ------------------------------------------------------------------------------------ the API's side

    @property
    def ready(self) -> bool:
        """Workers take work: two that have moved a test page, or a decode worker that needs no other."""
        return bool(self.fleet.pairs())

    @property
    def open_generations(self) -> int:
        """Generations submitted and not ended."""
        return len(self._generations)

    def submit(self, generation: Generation) -> None:
        """Take an admitted generation; whatever happens, its channel gets exactly one end."""
        generation.timings.admitted_at = time.monotonic()
        generation.move(GenerationState.PLACING)
        generation.prefix_keys = page_keys(
            generation.prompt_token_ids, self._page_size_tokens, generation.cache_salt
        )
        self._generations.add(generation)
        self._placer.place(generation)

    def turn_away(self, generation: Generation, kind: EndKind) -> None:
        """End a generation that was never submitted."""
        if generation.end is None:
            self._generations.end(generation, kind)

    def abandon(self, generation: Generation, kind: EndKind, detail: str | None = None) -> None:
        """End a generation from this side and tell both legs to stop; does nothing after its end."""
        self._generations.abandon(generation, kind, detail)

    def abandon_all(self, kind: EndKind, detail: str) -> None:
        """End every open generation."""
        for generation in self._generations.all():
            self.abandon(generation, kind, detail)

    # ------------------------------------------------------------------------------------ GatewayListener

    def worker_up(self, address: WorkerAddress) -> None:
        """A link stands. Work flows once the worker reports its load."""
        if (previous := self.fleet.get(address.worker_id)) is not None:
            # A new life means that the old one is over, whether or not its end was heard of.
            self.worker_down(address.worker_id, previous.address.epoch, "another life took its place")
        log.info("worker_up", worker=address.worker_id, role=address.role, epoch=address.epoch)
        self.fleet.add(address)
        self._last_batch[address.worker_id] = 0

    def worker_down(self, worker_id: str, epoch: int, reason: str) -> None:
        """Recompute everything that the worker held."""
        view = self.fleet.remove(worker_id, epoch)
        if view is None:
            return
        log.warning("worker_down", worker=worker_id, role=view.address.role, epoch=epoch, reason=reason)
        self._last_batch.pop(worker_id, None)
        self._placer.retry_all(view.own_requests, worker_id, view.address.role, "worker_lost")

    def worker_message(self, worker_id: str, message: WorkerMessage) -> None:
        """Act on what a worker says."""
        match message:
            case TokenBatch():
                self._on_tokens(worker_id, message)
            case LoadReport():
                self.fleet.take_report(worker_id, message)
                self._placer.unpark()
            case Reserved():
                self._on_reserved(worker_id, message)
            case PrefillFinished():
                self._on_prefill_finished(worker_id, message)
            case PrefillFailed():
                self._on_prefill_failed(worker_id, message)
            case RequestRefused():
                self._on_refused(worker_id, message)

    # --------------------------------------------------------------------------------------- worker events

    def _on_reserved(self, worker_id: str, message: Reserved) -> None:
        generation = self._generations.get(message.request_id)
        if generation is None or generation.decode_worker_id != worker_id:
            return
        if message.attempt < generation.attempt or generation.closing is not None:
            return
        if message.attempt > generation.attempt:
            if not self._reserved_anew(generation, message.attempt):
                return
        elif generation.state is not GenerationState.RESERVING:
            return
        generation.timings.pages_reserved(time.monotonic(), computed_by_decode=message.computes_prompt)
        if generation.decode_cached_tokens is None:
            generation.decode_cached_tokens = message.cached_tokens
        generation.refused_by.clear()
        generation.ticket = message.ticket
        if message.ticket is None:
            why = "computed_by_decode" if message.computes_prompt else "nothing_missing"
            self._metrics.disagg_decisions.labels("no_prefill", why).inc()
            generation.move(GenerationState.DECODING)
            return
        generation.move(GenerationState.PREFILLING)
        known = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        if message.ticket.kv_tokens + 1 > known:
            self._placer.retry(generation, Role.DECODE, "out_of_step")
            return
        self._placer.place_prefill(generation)

    def _reserved_anew(self, generation: Generation, attempt: int) -> bool:
        """Decode needs the sequence's KV again: preempted while it ran, or its KV never came.

        The second is a failure of the prefill leg that decode noticed first, and counts as one: False when it
        was the last and the generation has ended.
        """
        lost = generation.state is GenerationState.PREFILLING
        reason = "kv_lost" if lost else "preempted"
        log.warning("reserved_anew", request_id=generation.request_id, attempt=attempt, reason=reason)
        if lost:
            self.fleet.failed(generation.prefill_worker_id, time.monotonic())
            if not self._placer.count_failure(generation, Role.PREFILL, reason):
                return False
        else:
            self._metrics.retries.labels(Role.DECODE, reason).inc()
        self._legs.drop_prefill(generation, reason, generation.attempt)
        generation.attempt = attempt
        return True

    def _on_prefill_finished(self, worker_id: str, message: PrefillFinished) -> None:
        generation = self._current_prefill(worker_id, message.request_id, message.attempt)
        if generation is None:
            return
        generation.prefill_worker_id = None
        self.fleet.release(worker_id, generation.request_id)
        self.fleet.succeeded(worker_id, generation.prefix_keys, time.monotonic())
        generation.timings.prefill_done(message.queue_s, message.compute_s)
        if generation.prefill_cached_tokens is None:
            generation.prefill_cached_tokens = message.cached_tokens
        if generation.closing is not None:
            self._generations.end(generation, generation.closing)

    def _on_prefill_failed(self, worker_id: str, message: PrefillFailed) -> None:
        generation = self._current_prefill(worker_id, message.request_id, message.attempt)
        if generation is None:
            return
        generation.prefill_worker_id = None
        self.fleet.release(worker_id, generation.request_id)
        if generation.closing is not None:
            self._generations.end(generation, generation.closing)
            return
        self.fleet.failed(worker_id, time.monotonic())
        if message.stage == "handshake":
            # Its last report is older than this: every request would come back before the next one.
            self.fleet.unpair(worker_id, generation.decode_worker_id)
        log.warning("prefill_failed", worker=worker_id, stage=message.stage, reason=message.reason)
        if not generation.has_its_kv:
            self._placer.retry(generation, Role.PREFILL, message.stage)

    def _on_refused(self, worker_id: str, message: RequestRefused) -> None:
        generation = self._generations.get(message.request_id)
        if generation is None or message.attempt != generation.attempt or generation.closing is not None:
            return
        if not message.retryable:
            self.abandon(generation, EndKind.TOO_LARGE, message.reason)
            return
        if worker_id == generation.prefill_worker_id:
            self.fleet.release(worker_id, generation.request_id)
            generation.prefill_worker_id = None
            generation.refused_by.add(worker_id)
            self._placer.place_prefill(generation)
        elif worker_id == generation.decode_worker_id:
            self._legs.drop_prefill(generation, "refused", generation.attempt)
            self.fleet.release(worker_id, generation.request_id)
            generation.decode_worker_id = None
            generation.refused_by.add(worker_id)
            generation.next_attempt()
            generation.move(GenerationState.PLACING)
            self._placer.place(generation)

    def _on_tokens(self, worker_id: str, batch: TokenBatch) -> None:
        view = self.fleet.get(worker_id)
        if view is None or batch.epoch != view.address.epoch:
            return
        last = self._last_batch[worker_id]
        if batch.sequence_number > last + 1:
            log.error("token_batches_missing", worker=worker_id, last=last, got=batch.sequence_number)
            self._last_batch[worker_id] = batch.sequence_number
            self._acknowledge(worker_id, batch.sequence_number)
            self._placer.retry_all(view.own_requests, worker_id, Role.DECODE, "tokens_missing")
            return
        if batch.sequence_number == last + 1:
            self._last_batch[worker_id] = batch.sequence_number
            now = time.monotonic()
            for output in batch.outputs:
                generation = self._generations.get(output.request_id)
                if generation is not None and generation.decode_worker_id == worker_id:
                    self._on_output(generation, output, now)
        self._acknowledge(worker_id, self._last_batch[worker_id])

    def _on_output(self, generation: Generation, output: TokenOutput, now: float) -> None:
        if not generation.believes(output.attempt) or generation.closing is not None:
            return
        known = len(generation.output_token_ids)
        if output.position > known:
            self._placer.retry(generation, Role.DECODE, "tokens_missing")
            return
        fresh = output.token_ids[known - output.position :]
        if fresh:
            current = output.attempt == generation.attempt
            if current and generation.state is not GenerationState.DECODING:
                generation.move(GenerationState.DECODING)
            logprobs = output.logprobs[known - output.position :] if output.logprobs is not None else None
            if output.first_step_s is not None and generation.timings.first_token_at is None:
                generation.timings.first_step_s = output.first_step_s
            self._generations.tokens_arrived(generation, len(fresh), now)
            generation.deliver(fresh, logprobs)
            if generation.channel.held_tokens > self._config.slow_client_buffer_tokens:
                self._metrics.slow_clients.inc()
                self.abandon(generation, EndKind.SLOW_CLIENT, "the client reads too slowly")
                return
        if output.finish is not None:
            self._on_finish(generation, output.finish, now)

    def _on_finish(self, generation: Generation, finish: Finish, now: float) -> None:
        match finish.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                kind = EndKind.STOP if finish.reason is FinishReason.STOP else EndKind.LENGTH
                self.fleet.succeeded(generation.decode_worker_id, generation.prefix_keys, now)
                if generation.prefill_worker_id is None:
                    self._generations.end(generation, kind)
                    return
                generation.closing = kind
                generation.wait_timer = self._loop.call_later(
                    PREFILL_REPORT_WAIT_S, self._generations.end, generation, kind
                )
            case FinishReason.DEADLINE:
                self.abandon(generation, EndKind.DEADLINE, "the deadline has passed")
            case FinishReason.GRAMMAR:
                self.abandon(generation, EndKind.GRAMMAR, finish.error)
            case FinishReason.ERROR | FinishReason.ABORT:
                self.fleet.failed(generation.decode_worker_id, now)
                log.warning("decode_failed", worker=generation.decode_worker_id, error=finish.error)
                self._placer.retry(generation, Role.DECODE, finish.reason)

    def _current_prefill(self, worker_id: str, request_id: str, attempt: int) -> Generation | None:
        generation = self._generations.get(request_id)
        if generation is None or generation.prefill_worker_id != worker_id or generation.attempt != attempt:
            return None
        return generation

    def _acknowledge(self, worker_id: str, sequence_number: int) -> None:
        try:
            self._gateway.send(worker_id, TokensAck(sequence_number))
        except WorkerUnreachable as error:
            # The link's own end will be reported; a lost acknowledgement loses no token.
            log.warning("acknowledgement_lost", worker=worker_id, error=str(error))
