"""Runs generations over the fleet: from admission to the one end of each, through refusals and deaths.

Everything happens on the router's event loop, in callbacks that do not wait. A generation that loses a
worker goes back to placement with its emitted tokens and the next attempt number, so the client sees neither
a gap nor a repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from antiphon.configs.schema import RouterConfig
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
from antiphon.router.dispatch.accounts import Accounts
from antiphon.router.dispatch.fleet import Fleet
from antiphon.router.dispatch.gateway import WorkerGateway, WorkerMessage, WorkerUnreachable
from antiphon.router.dispatch.generation import Generation
from antiphon.router.dispatch.legs import Legs, Placed
from antiphon.router.dispatch.prefix_index import page_keys
from antiphon.router.lifecycle import EndKind, GenerationState
from antiphon.router.metrics import RouterMetrics

log = structlog.get_logger("antiphon.router.dispatch")

PREFILL_FULL_RETRY_S = 0.05
"""A reservation whose prefill workers were all full asks again after this long."""
PREFILL_REPORT_WAIT_S = 0.25
"""A generation that ended before its prefill worker's report waits this long for it, for exact usage."""
NO_WORKER_RETRY_AFTER_S = 5.0
OVERLOADED_RETRY_AFTER_S = 1.0


class Dispatcher:
    """Owns every generation between admission and its end. Implements ``GatewayListener``."""

    def __init__(
        self, gateway: WorkerGateway, config: RouterConfig, page_size_tokens: int, metrics: RouterMetrics
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._page_size_tokens = page_size_tokens
        self._metrics = metrics
        self._accounts = Accounts(metrics)
        self._loop = asyncio.get_running_loop()
        self.fleet = Fleet(metrics, page_size_tokens)
        self._legs = Legs(gateway, self.fleet, metrics, self._loop.time)
        self._generations: dict[str, Generation] = {}
        self._parked: dict[str, Generation] = {}
        self._last_batch: dict[str, int] = {}

    # ------------------------------------------------------------------------------------ the API's side

    @property
    def ready(self) -> bool:
        """A prefill and a decode worker have moved a test page and take work."""
        return bool(self.fleet.pairs())

    @property
    def open_generations(self) -> int:
        """Generations submitted and not ended."""
        return len(self._generations)

    def submit(self, generation: Generation) -> None:
        """Take an admitted generation; whatever happens, its channel gets exactly one end."""
        generation.timings.queue_s = self._loop.time() - generation.received_at
        generation.move(GenerationState.PLACING)
        generation.prefix_keys = page_keys(
            generation.prompt_token_ids, self._page_size_tokens, generation.cache_salt
        )
        self._generations[generation.request_id] = generation
        generation.deadline_timer = self._loop.call_at(
            generation.deadline_at, self.abandon, generation, EndKind.DEADLINE, "the deadline has passed"
        )
        self._place(generation)

    def turn_away(self, generation: Generation, kind: EndKind) -> None:
        """End a generation that was never submitted."""
        if generation.end is None:
            self._end(generation, kind)

    def abandon(self, generation: Generation, kind: EndKind, detail: str | None = None) -> None:
        """End a generation from this side and tell both legs to stop; does nothing after its end."""
        if generation.end is not None:
            return
        self._legs.abort(generation, kind)
        self._end(generation, kind, detail)

    def abandon_all(self, kind: EndKind, detail: str) -> None:
        """End every open generation."""
        for generation in list(self._generations.values()):
            self.abandon(generation, kind, detail)

    # ------------------------------------------------------------------------------------ GatewayListener

    def worker_up(self, address: WorkerAddress) -> None:
        """A link stands. Work flows once the worker reports its load."""
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
        self._retry_all(view.own_requests, worker_id, view.address.role, "worker_lost")

    def worker_message(self, worker_id: str, message: WorkerMessage) -> None:
        """Act on what a worker says."""
        match message:
            case TokenBatch():
                self._on_tokens(worker_id, message)
            case LoadReport():
                self.fleet.take_report(worker_id, message)
                self._unpark()
            case Reserved():
                self._on_reserved(worker_id, message)
            case PrefillFinished():
                self._on_prefill_finished(worker_id, message)
            case PrefillFailed():
                self._on_prefill_failed(worker_id, message)
            case RequestRefused():
                self._on_refused(worker_id, message)

    # ------------------------------------------------------------------------------------------ placement

    def _place(self, generation: Generation) -> None:
        match self._legs.place_decode(generation):
            case Placed.SENT:
                generation.move(GenerationState.RESERVING)
            case Placed.ALL_REFUSED if not generation.failures:
                self._end(
                    generation, EndKind.OVERLOADED, "every decode worker is full", OVERLOADED_RETRY_AFTER_S
                )
            case Placed.NO_WORKER if not generation.failures:
                self._end(
                    generation,
                    EndKind.NO_WORKER,
                    "no ready pair of a prefill and a decode worker",
                    NO_WORKER_RETRY_AFTER_S,
                )
            case _:
                self._park(generation)

    def _park(self, generation: Generation) -> None:
        """Keep a started generation until a worker can take it; load reports wake it."""
        self._parked[generation.request_id] = generation
        if generation.wait_timer is None:
            generation.wait_timer = self._loop.call_later(
                self._config.worker_replacement_wait_s,
                self.abandon,
                generation,
                EndKind.NO_WORKER,
                "the worker died and no other took over",
            )

    def _unpark(self) -> None:
        for generation in list(self._parked.values()):
            del self._parked[generation.request_id]
            generation.refused_by.clear()
            self._place(generation)
            if generation.state is GenerationState.RESERVING:
                self._cancel_wait(generation)

    def _place_prefill(self, generation: Generation) -> None:
        if generation.end is not None or generation.state is not GenerationState.PREFILLING:
            return
        self._cancel_wait(generation)
        match self._legs.place_prefill(generation):
            case Placed.SENT:
                return
            case Placed.ALL_REFUSED:
                generation.refused_by.clear()
                generation.wait_timer = self._loop.call_later(
                    PREFILL_FULL_RETRY_S, self._place_prefill, generation
                )
            case Placed.NO_WORKER:
                self._retry(generation, Role.PREFILL, "no_worker")

    def _retry(self, generation: Generation, leg: Role, reason: str) -> None:
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
        self._cancel_wait(generation)
        self._legs.abort(generation, reason)
        generation.failures += 1
        if generation.failures >= self._config.max_attempts:
            self._end(generation, EndKind.FAILED, f"{leg} failed in {generation.failures} attempts: {reason}")
            return
        self._metrics.retries.labels(leg, reason).inc()
        generation.attempt += 1
        generation.refused_by.clear()
        generation.move(GenerationState.PLACING)
        self._place(generation)

    def _retry_all(self, request_ids: Iterable[str], worker_id: str, role: Role, reason: str) -> None:
        for request_id in list(request_ids):
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            if generation.closing is not None:
                self._end(generation, generation.closing)
            elif worker_id in (generation.decode_worker_id, generation.prefill_worker_id):
                self._retry(generation, role, reason)

    # --------------------------------------------------------------------------------------- worker events

    def _on_reserved(self, worker_id: str, message: Reserved) -> None:
        generation = self._generations.get(message.request_id)
        if generation is None or generation.decode_worker_id != worker_id:
            return
        if message.attempt < generation.attempt or generation.closing is not None:
            return
        if message.attempt > generation.attempt:
            self._legs.drop_prefill(generation, "preempted")
            self._metrics.retries.labels(Role.DECODE, "preempted").inc()
            generation.attempt = message.attempt
        elif generation.state is not GenerationState.RESERVING:
            return
        if generation.timings.reserve_s is None:
            generation.timings.reserve_s = message.reserve_s
            generation.decode_cached_tokens = message.cached_tokens
        generation.refused_by.clear()
        generation.ticket = message.ticket
        if message.ticket is None:
            self._metrics.disagg_decisions.labels("no_prefill", "nothing_missing").inc()
            generation.move(GenerationState.DECODING)
            return
        generation.move(GenerationState.PREFILLING)
        known = len(generation.prompt_token_ids) + len(generation.output_token_ids)
        if message.ticket.kv_tokens + 1 > known:
            self._retry(generation, Role.DECODE, "out_of_step")
            return
        self._place_prefill(generation)

    def _on_prefill_finished(self, worker_id: str, message: PrefillFinished) -> None:
        generation = self._current_prefill(worker_id, message.request_id, message.attempt)
        if generation is None:
            return
        generation.prefill_worker_id = None
        self.fleet.release(worker_id, generation.request_id)
        self.fleet.succeeded(worker_id, generation.prefix_keys, self._loop.time())
        if generation.timings.prefill_s is None:
            generation.timings.prefill_queue_s = message.queue_s
            generation.timings.prefill_s = message.compute_s
            generation.timings.transfer_s = message.transfer_tail_s
        if generation.prefill_cached_tokens is None:
            generation.prefill_cached_tokens = message.cached_tokens
        if generation.closing is not None:
            self._end(generation, generation.closing)

    def _on_prefill_failed(self, worker_id: str, message: PrefillFailed) -> None:
        generation = self._current_prefill(worker_id, message.request_id, message.attempt)
        if generation is None:
            return
        generation.prefill_worker_id = None
        self.fleet.release(worker_id, generation.request_id)
        if generation.closing is not None:
            self._end(generation, generation.closing)
            return
        self.fleet.failed(worker_id, self._loop.time())
        log.warning("prefill_failed", worker=worker_id, stage=message.stage, reason=message.reason)
        self._retry(generation, Role.PREFILL, message.stage)

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
            self._place_prefill(generation)
        elif worker_id == generation.decode_worker_id:
            self._legs.drop_prefill(generation, "refused")
            self.fleet.release(worker_id, generation.request_id)
            generation.decode_worker_id = None
            generation.refused_by.add(worker_id)
            generation.attempt += 1
            generation.move(GenerationState.PLACING)
            self._place(generation)

    def _on_tokens(self, worker_id: str, batch: TokenBatch) -> None:
        view = self.fleet.get(worker_id)
        if view is None or batch.epoch != view.address.epoch:
            return
        last = self._last_batch[worker_id]
        if batch.sequence_number > last + 1:
            log.error("token_batches_missing", worker=worker_id, last=last, got=batch.sequence_number)
            self._last_batch[worker_id] = batch.sequence_number
            self._acknowledge(worker_id, batch.sequence_number)
            self._retry_all(view.own_requests, worker_id, Role.DECODE, "tokens_missing")
            return
        if batch.sequence_number == last + 1:
            self._last_batch[worker_id] = batch.sequence_number
            now = self._loop.time()
            for output in batch.outputs:
                generation = self._generations.get(output.request_id)
                if generation is not None and generation.decode_worker_id == worker_id:
                    self._on_output(generation, output, now)
        self._acknowledge(worker_id, self._last_batch[worker_id])

    def _on_output(self, generation: Generation, output: TokenOutput, now: float) -> None:
        if output.attempt != generation.attempt or generation.closing is not None:
            return
        known = len(generation.output_token_ids)
        if output.position > known:
            self._retry(generation, Role.DECODE, "tokens_missing")
            return
        fresh = output.token_ids[known - output.position :]
        if fresh:
            if generation.state is not GenerationState.DECODING:
                generation.move(GenerationState.DECODING)
            logprobs = output.logprobs[known - output.position :] if output.logprobs is not None else None
            self._accounts.tokens_arrived(generation, len(fresh), now)
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
                generation.take_finish_timings(finish)
                self.fleet.succeeded(generation.decode_worker_id, generation.prefix_keys, now)
                if generation.prefill_worker_id is None:
                    self._end(generation, kind)
                    return
                generation.closing = kind
                generation.wait_timer = self._loop.call_later(
                    PREFILL_REPORT_WAIT_S, self._end, generation, kind
                )
            case FinishReason.DEADLINE:
                self.abandon(generation, EndKind.DEADLINE, "the deadline has passed")
            case FinishReason.ERROR | FinishReason.ABORT:
                self.fleet.failed(generation.decode_worker_id, now)
                log.warning("decode_failed", worker=generation.decode_worker_id, error=finish.error)
                self._retry(generation, Role.DECODE, finish.reason)

    # ------------------------------------------------------------------------------------------- the end

    def _end(
        self,
        generation: Generation,
        kind: EndKind,
        detail: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self._cancel_wait(generation)
        if generation.deadline_timer is not None:
            generation.deadline_timer.cancel()
            generation.deadline_timer = None
        self._generations.pop(generation.request_id, None)
        self._parked.pop(generation.request_id, None)
        for worker_id in (generation.decode_worker_id, generation.prefill_worker_id):
            self.fleet.release(worker_id, generation.request_id)
        stage = generation.state
        generation.finish_with(kind, detail, retry_after_s)
        self._accounts.ended(generation, kind, stage, self._loop.time())

    def _current_prefill(self, worker_id: str, request_id: str, attempt: int) -> Generation | None:
        generation = self._generations.get(request_id)
        if generation is None or generation.prefill_worker_id != worker_id or generation.attempt != attempt:
            return None
        return generation

    def _cancel_wait(self, generation: Generation) -> None:
        if generation.wait_timer is not None:
            generation.wait_timer.cancel()
            generation.wait_timer = None

    def _acknowledge(self, worker_id: str, sequence_number: int) -> None:
        try:
            self._gateway.send(worker_id, TokensAck(sequence_number))
        except WorkerUnreachable as error:
            # The link's own end will be reported; a lost acknowledgement loses no token.
            log.warning("acknowledgement_lost", worker=worker_id, error=str(error))
