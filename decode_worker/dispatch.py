"""What a decode worker does with each message and each engine event: the owner of its requests.

Everything runs on the link thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

import msgspec

from antiphon.decode_worker.forks import Forks
from antiphon.decode_worker.greeter import PrefillGreeter
from antiphon.decode_worker.metrics import DecodeMetrics
from antiphon.decode_worker.outbox import Outboxes
from antiphon.decode_worker.receiver import Key, KvReceiver
from antiphon.decode_worker.requests import DecodeRequest
from antiphon.engine.events import (
    EngineEvent,
    PagesReserved,
    PrefillStarted,
    SequenceFinished,
    TokensSampled,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.rejection import RequestRejected
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TRANSFER_STAGES, WireError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    KvHello,
    KvProbe,
    KvRefused,
    WriteDone,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.messages import (
    AbortRequest,
    Finish,
    GenerateRequest,
    KvTicket,
    RequestRefused,
    Reserved,
    TokenOutput,
    TokensAck,
)
from antiphon.protocol.staging_messages import StagingMessage

_log = logging.getLogger(__name__)
_FAILURE_STAGES = (*TRANSFER_STAGES, "compute")


class DecodeDispatch:
    """All requests of one decode worker."""

    def __init__(
        self,
        engine: EngineLoop,
        node: LinkNode,
        greeter: PrefillGreeter,
        counters: Counter[str],
        metrics: DecodeMetrics,
        local_prefill_limit: float = 0,
    ) -> None:
        """``local_prefill_limit``: prompts of at most so many tokens are computed here."""
        self.draining = False
        self._local_prefill_limit = local_prefill_limit
        self._engine = engine
        self._node = node
        self._greeter = greeter
        self._counters = counters
        self._metrics = metrics
        self._receiver: KvReceiver | None = None
        self._requests: dict[str, DecodeRequest] = {}
        self._forks = Forks()
        self._outboxes = Outboxes(node, counters)
        self._quarantined: set[Key] = set()
        """Attempts that the engine ended while a writer could still write their pages."""

    def __len__(self) -> int:
        return len(self._requests) + len(self._quarantined)

    @property
    def receiver(self) -> KvReceiver:
        """What is on its way in."""
        if self._receiver is None:
            raise RuntimeError("the receiver was not set")
        return self._receiver

    def receive_through(self, receiver: KvReceiver) -> None:
        """Set the receiver, whose outcomes come back here."""
        self._receiver = receiver

    # ---------------------------------------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: object) -> None:
        """One message of a peer; a stale or misdirected one is dropped and counted."""
        match peer.role, message:
            case Role.ROUTER, GenerateRequest():
                self._on_generate(peer, message)
            case Role.ROUTER, AbortRequest():
                self._on_abort(peer, message)
            case Role.ROUTER, TokensAck():
                self._outboxes.acknowledged(peer, message)
            case Role.PREFILL, KvHello():
                self._greeter.on_hello(peer, message)
            case Role.PREFILL, KvProbe():
                self._greeter.on_probe(peer, message)
            case Role.PREFILL, KvRefused():
                self._greeter.on_refused(peer, message)
            case Role.PREFILL, AnnounceWrites():
                self.receiver.on_announce(peer, message)
            case Role.PREFILL, WritesDrained():
                self.receiver.on_drained(peer, message)
            case Role.PREFILL, WritesFailed():
                stage = message.stage if message.stage in _FAILURE_STAGES else "unknown"
                self._counters[f"failures_{stage}"] += 1
                self.receiver.on_failed(peer, message)
            case _:
                self._counters["messages_misdirected"] += 1
                _log.warning("%s sent a %s to a decode worker", peer, type(message).__name__)

    def on_notification(self, sender: str, payload: bytes) -> None:
        """A notification that came over the transport."""
        writer = self._greeter.writer_of(sender)
        try:
            message = decode(payload)
        except WireError as error:
            self._counters["notifications_undecodable"] += 1
            _log.warning("notification from %s: %s", sender, error)
            return
        if isinstance(message, StagingMessage):
            self._counters["staged_messages_refused"] += 1  # and logged where it came
            return
        if writer is None or not isinstance(message, WriteDone):
            self._counters["notifications_unknown"] += 1
            return
        self.receiver.on_write_done(writer, message)

    def _on_generate(self, router: Peer, message: GenerateRequest) -> None:
        request_id, attempt = message.request_id, message.attempt
        if self.draining:
            self._node.send(router, RequestRefused(request_id, attempt, "this worker is draining", True))
            return
        old = self._requests.get(request_id)
        if old is None:
            self._take(DecodeRequest.of(message, router))
        elif old.router != router or attempt > old.message.attempt:
            old.successor, old.silent = message, True  # its own end concerns nobody any more
            old.router = router
            self._abort(old)
        else:
            self._counters["requests_repeated"] += 1

    def _take(self, request: DecodeRequest) -> None:
        first = self._requests.get(request.message.fork_of)
        # Without a prefix cache nothing is shared.
        if first is None or first.ending or not self._engine.settings.prefix_cache:
            self._submit(request)
        elif first.has_spoken:
            request.shares_prompt = True
            self._submit(request)
        else:
            self._keep(request)
            self._forks.wait(first, request)

    def _release_forks(self, request_id: str, *, share: bool) -> None:
        """Go on with those that waited for a request that has spoken, or has ended without a word."""
        for fork in self._forks.take(request_id):
            del self._requests[fork.message.request_id]
            fork.shares_prompt = share
            self._counters["prompts_shared"] += share
            self._submit(fork)

    def _submit(self, request: DecodeRequest, known_as: int | None = None) -> None:
        """``known_as``: the attempt that the router was told of, where it is not the one that begins."""
        message, attempt = request.message, request.attempt if known_as is None else known_as
        try:
            self._engine.submit(request.for_engine(self._local_prefill_limit))
        except RequestRejected as error:
            refused = RequestRefused(message.request_id, attempt, error.reason, error.retryable)
            self._node.send(request.router, refused)
            return
        self._keep(request)

    def _keep(self, request: DecodeRequest) -> None:
        self._requests[request.message.request_id] = request
        request.taken = True

    def _on_abort(self, router: Peer, message: AbortRequest) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.router != router:
            return  # ended already, and the router was told
        if request.successor is not None:
            if request.successor.attempt <= message.attempt:
                request.successor = None
        elif request.message.attempt <= message.attempt:
            self._abort(request)

    def _abort(self, request: DecodeRequest) -> None:
        if self._forks.drop(request):
            del self._requests[request.message.request_id]
            if request.successor is not None:
                self._submit(request.follow(request.successor))
            return
        request.ending, request.moving = True, False
        key = request.message.request_id, request.attempt
        writing = self.receiver.abandon(key)
        self._engine.abort(request.message.request_id, request.submitted_attempt, writer_granted=writing)

    # ----------------------------------------------------------------------------------------- engine events

    def on_reserved(self, event: PagesReserved) -> None:
        """The engine holds pages: the router may choose a prefill worker now."""
        request = self._requests.get(event.request_id)
        if request is None or request.ending:
            return  # the engine frees these pages: nobody may be allowed to write them
        request.attempt = event.attempt
        self._metrics.reserved(request, event.reserve_s)
        ticket = None
        if event.kv_tokens > event.cached_tokens:
            ticket = KvTicket(
                self._node.me.worker_id,
                self._node.me.epoch,
                event.request_id,
                event.attempt,
                event.kv_tokens,
                event.cached_tokens,
                list(event.full_pages),
                list(event.sliding_pages),
                event.sliding_first_page,
            )
            self.receiver.reserve((event.request_id, event.attempt))
        request.runnable_at = time.monotonic() if ticket is None else None
        if not request.silent:
            reserved = Reserved(event.request_id, event.attempt, event.cached_tokens, ticket, event.reserve_s)
            self._node.send(request.router, reserved)

    def on_prefill_started(self, event: PrefillStarted) -> None:
        """The engine holds pages and computes the prompt itself: there is nothing for the router to do."""
        request = self._requests.get(event.request_id)
        if request is None or request.ending:
            return
        request.attempt = event.attempt
        self._counters["prompts_computed_here"] += 1
        self._metrics.reserved(request, event.queue_s)
        request.runnable_at = time.monotonic()
        if not request.silent:
            reserved = Reserved(
                event.request_id, event.attempt, event.cached_tokens, None, event.queue_s, True
            )
            self._node.send(request.router, reserved)

    def on_engine_events(self, events: list[EngineEvent]) -> None:
        """What a step returned: its tokens go out as one batch per router."""
        outputs: dict[Peer, dict[str, TokenOutput]] = {}
        for event in events:
            if isinstance(event, TokensSampled):
                self._on_tokens(event, outputs)
            elif isinstance(event, SequenceFinished):
                self._on_finished(event, outputs)
        for router, by_request in outputs.items():
            self._outboxes.send(router, list(by_request.values()))

    def _on_tokens(self, event: TokensSampled, outputs: dict[Peer, dict[str, TokenOutput]]) -> None:
        self._release_forks(event.request_id, share=True)
        request = self._requests.get(event.request_id)
        if request is None or request.silent:
            return
        request.emitted += event.token_ids
        first_step_s = None
        if request.runnable_at is not None:
            first_step_s, request.runnable_at = time.monotonic() - request.runnable_at, None
            self._metrics.first_tokens(request, first_step_s)
        outputs.setdefault(request.router, {})[event.request_id] = TokenOutput(
            event.request_id,
            event.attempt,
            event.position,
            list(event.token_ids),
            list(event.logprobs) if event.logprobs is not None else None,
            first_step_s=first_step_s,
        )

    def _on_finished(self, event: SequenceFinished, outputs: dict[Peer, dict[str, TokenOutput]]) -> None:
        self._release_forks(event.request_id, share=False)
        key = event.request_id, event.attempt
        writing = self.receiver.abandon(key)
        if event.quarantined and writing:
            self._quarantined.add(key)
        elif event.quarantined:
            self._engine.release_quarantined(*key)
        request = self._requests.pop(event.request_id, None)
        if request is None:
            return
        self._metrics.finished(request, event)
        if request.successor is not None:
            self._submit(request.follow(request.successor))
        elif request.moving:
            request.ending = request.moving = False
            request.submitted_attempt = request.attempt = event.attempt + 1
            self._submit(request, known_as=event.attempt)
        elif not request.silent:
            finish = Finish(
                event.reason,
                event.stop_token_id,
                event.error,
                request.transfer_s,
                event.first_step_s,
                event.decode_s,
                event.preemptions,
            )
            router_outputs = outputs.setdefault(request.router, {})
            last = router_outputs.get(event.request_id) or TokenOutput(
                event.request_id, event.attempt, len(request.emitted), []
            )
            router_outputs[event.request_id] = msgspec.structs.replace(last, finish=finish)

    # ------------------------------------------------------------------------------------------ KV outcomes

    def kv_complete(self, key: Key, transfer_s: float) -> None:
        """See ReceiveOutcomes."""
        self._counters["receives_complete"] += 1
        request = self._requests.get(key[0])
        if request is not None:
            request.transfer_s += transfer_s
            request.runnable_at = time.monotonic()
            self._metrics.kv_received(request, transfer_s)
        self._engine.kv_ready(*key)

    def kv_lost(self, key: Key) -> None:
        """See ReceiveOutcomes. The engine reserves again, and the router hears of it as attempt + 1."""
        self._counters["receives_lost"] += 1
        self._engine.kv_lost(*key)

    def kv_stuck(self, key: Key) -> None:
        """See ReceiveOutcomes. The request goes on with other pages; these stay in quarantine."""
        request = self._requests.get(key[0])
        if request is None or request.attempt != key[1]:
            return
        request.ending = request.moving = True
        self._engine.abort(key[0], request.submitted_attempt, writer_granted=True)

    def pages_released(self, key: Key) -> None:
        """See ReceiveOutcomes. Before the engine's own end has come, that end will find no writer."""
        if key in self._quarantined:
            self._quarantined.remove(key)
            self._engine.release_quarantined(*key)

    # -------------------------------------------------------------------------------------------------- links

    def on_up(self, peer: Peer) -> None:
        """A link stands."""
        if peer.role is Role.ROUTER:
            self._outboxes.open(peer)
        else:
            self.receiver.on_writer_up(peer)

    def on_lost(self, peer: Peer) -> None:
        """A link's session ended."""
        if peer.role is Role.ROUTER:
            self._outboxes.close(peer)
            for request in list(self._requests.values()):
                if request.router == peer:
                    self._counters["requests_of_lost_routers"] += 1
                    request.silent, request.successor = True, None
                    self._abort(request)
        else:
            self._greeter.on_lost(peer)
            self.receiver.on_writer_lost(peer)
