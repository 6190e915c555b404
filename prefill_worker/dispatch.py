"""What a prefill worker does with each message and each engine event: the owner of its jobs.

Everything runs on the link thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from antiphon.configs.workers import TransferConfig
from antiphon.engine.events import EngineEvent, KvWritten, PrefillComputed, PrefillStarted, SequenceFinished
from antiphon.engine.loop import EngineLoop
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.kv_transfer.endpoint import KvEndpoint
from antiphon.kv_transfer.ranks import RankKv, Shipped
from antiphon.prefill_worker.correspondence import Correspondence
from antiphon.prefill_worker.jobs import Failure, JobState, PrefillJob
from antiphon.prefill_worker.metrics import PrefillMetrics
from antiphon.prefill_worker.orders import announced_writes, ship_order, ticket_problem
from antiphon.prefill_worker.peers import DecodePeers
from antiphon.protocol.errors import TransferError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import (
    CancelWrites,
    GrantWrites,
    KvProbeResult,
    KvRefused,
    KvWelcome,
    MissingWrites,
    RefuseWrites,
    WriteKey,
)
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import (
    AbortRequest,
    FinishReason,
    PrefillFailed,
    PrefillFinished,
    PrefillRequest,
    RequestRefused,
)
from antiphon.protocol.rank_messages import StepMark

_log = logging.getLogger(__name__)


class PrefillDispatch:
    """All jobs of one prefill worker."""

    def __init__(
        self,
        engine: EngineLoop,
        node: LinkNode,
        thread: LinkThread,
        peers: DecodePeers,
        endpoint: KvEndpoint,
        ranks: Sequence[RankKv],
        counters: Counter[str],
        settings: TransferConfig,
        metrics: PrefillMetrics,
    ) -> None:
        """``endpoint`` is rank 0's, the first of ``ranks``."""
        self.draining = False
        self._engine = engine
        self._node = node
        self._thread = thread
        self._peers = peers
        self._ranks = ranks
        self._counters = counters
        self._settings = settings
        self._metrics = metrics
        self._page_size = engine.settings.page_size_tokens
        self._jobs: dict[tuple[str, int], PrefillJob] = {}
        self._by_engine_id: dict[str, PrefillJob] = {}
        self._announcements = itertools.count(1)
        patience_s = settings.completion_timeout_s
        self._correspondence = Correspondence(node, endpoint, ranks, counters, patience_s, peers.distrust)

    def __len__(self) -> int:
        return len(self._jobs)

    # ---------------------------------------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: object) -> None:
        """One message of a peer; a stale or misdirected one is dropped and counted."""
        match peer.role, message:
            case Role.ROUTER, PrefillRequest():
                self._on_request(peer, message)
            case Role.ROUTER, AbortRequest():
                self._on_abort(message)
            case Role.DECODE, KvWelcome():
                self._peers.on_welcome(peer, message)
            case Role.DECODE, KvRefused():
                self._peers.on_refused(peer, message)
            case Role.DECODE, KvProbeResult():
                self._peers.on_probe_result(peer, message)
                for job in self._jobs.values():
                    if job.decode == peer and message.ok:
                        self._correspondence.connected_anew(job)
            case Role.DECODE, GrantWrites() | RefuseWrites() | MissingWrites() | CancelWrites():
                if message.decode_epoch != peer.epoch:
                    self._counters["stale_messages"] += 1
                else:
                    self._on_decode_message(peer, message)
            case _:
                self._counters["messages_misdirected"] += 1
                _log.warning("%s sent a %s to a prefill worker", peer, type(message).__name__)

    def _on_request(self, router: Peer, message: PrefillRequest) -> None:
        key = message.request_id, message.attempt
        ticket = message.ticket
        if self.draining:
            self._node.send(router, RequestRefused(*key, "this worker is draining", retryable=True))
            return
        if key in self._jobs:
            self._counters["requests_repeated"] += 1
            return
        if (ticket.request_id, ticket.attempt) != key or len(message.token_ids) - 1 != ticket.kv_tokens:
            reason = (
                f"{len(message.token_ids)} tokens of attempt {message.attempt} with a ticket of "
                f"{ticket.request_id} attempt {ticket.attempt} for {ticket.kv_tokens} positions"
            )
            self._node.send(router, PrefillFailed(*key, "reserve", reason))
            return
        problem = ticket_problem(ticket, self._page_size, self._engine.settings.window_tokens)
        if problem:
            reason = f"a ticket of {ticket.decode_worker_id} for {problem}"
            self._node.send(router, PrefillFailed(*key, "reserve", reason))
            return
        found = self._peers.find(ticket.decode_worker_id, ticket.decode_epoch)
        if found is None:
            reason = f"no handshake with {ticket.decode_worker_id} (epoch {ticket.decode_epoch})"
            self._node.send(router, PrefillFailed(*key, "handshake", reason))
            return
        job = PrefillJob(message, router, found, next(self._announcements))
        request = EngineRequest(
            job.engine_id,
            message.attempt,
            RequestKind.PREFILL_ONLY,
            tuple(message.token_ids),
            priority=message.priority,
            deadline_s=message.deadline_s,
            cache_salt=message.cache_salt,
        )
        try:
            self._engine.submit(request)
        except RequestRejected as error:
            self._node.send(router, RequestRefused(*key, error.reason, error.retryable))
            return
        self._jobs[key] = self._by_engine_id[job.engine_id] = job

    def _on_abort(self, message: AbortRequest) -> None:
        for job in list(self._jobs.values()):
            if job.request.request_id == message.request_id and job.request.attempt <= message.attempt:
                self._cancel(job)

    def _on_decode_message(
        self, peer: Peer, message: GrantWrites | RefuseWrites | MissingWrites | CancelWrites
    ) -> None:
        key = message.request_id, message.attempt
        job = self._jobs.get(key)
        if job is not None and job.decode != peer:
            self._counters["stale_messages"] += 1
        elif isinstance(message, CancelWrites):
            self._on_cancel(peer, message, job)
        elif isinstance(message, MissingWrites):
            self._correspondence.missing(peer, message, job)
        elif job is None or message.announcement != job.announcement:
            self._counters["stale_messages"] += 1
        elif isinstance(message, RefuseWrites):
            self._fail(job, "reserve", message.reason)
        elif job.state is JobState.ANNOUNCED:
            job.move(JobState.GRANTED)
            waiting, job.waiting = job.waiting, []
            for event, mark in waiting:
                self._ship(job, event, mark)

    def _on_cancel(self, peer: Peer, message: CancelWrites, job: PrefillJob | None) -> None:
        if job is None or job.state is JobState.SHIPPED or job.told:  # nothing is and will be under way
            key = message.request_id, message.attempt
            self._correspondence.stopped(peer, key, message.decode_epoch)
            return
        job.drain_asked = True
        self._cancel(job)

    # ------------------------------------------------------------------------------------------ engine events

    def on_started(self, event: PrefillStarted) -> None:
        """The engine has planned a job, and where its steps overlap launched the first chunk: its writes are
        known, ask for permission. What is computed before that comes waits in ``job.waiting``."""
        job = self._by_engine_id.get(event.request_id)
        if job is None or job.state is not JobState.QUEUED:
            return
        job.keys = announced_writes(event.chunks, self._settings.layer_groups, len(self._ranks))
        job.cached_tokens, job.queue_s = event.cached_tokens, event.queue_s
        job.move(JobState.ANNOUNCED)
        job.announced_at = time.monotonic()
        self._correspondence.announce(job)

    def on_kv_written(self, event: KvWritten, mark: StepMark) -> None:
        """A layer group of a chunk was issued, and is computed on a rank that has passed ``mark``."""
        job = self._by_engine_id.get(event.request_id)
        if job is None:
            return
        if job.state is JobState.ANNOUNCED:
            job.waiting.append((event, mark))
        elif job.state is JobState.GRANTED:
            self._ship(job, event, mark)

    def on_engine_events(self, events: list[EngineEvent]) -> None:
        """What a step returned; its KvWritten and PrefillStarted came earlier by callback."""
        for event in events:
            if isinstance(event, PrefillComputed):
                job = self._by_engine_id.get(event.request_id)
                if job is not None:
                    job.computed, job.compute_s = True, event.compute_s
                    job.computed_at = time.monotonic()
                    self._advance(job)
            elif isinstance(event, SequenceFinished):
                self._on_sequence_finished(event)

    def _on_sequence_finished(self, event: SequenceFinished) -> None:
        job = self._by_engine_id.pop(event.request_id, None)
        if job is None:
            return
        job.engine_ended, job.quarantined = True, event.quarantined
        if event.reason not in (FinishReason.STOP, FinishReason.ABORT):
            self._fail(job, "compute", event.error or event.reason.value)
        self._advance(job)

    # ------------------------------------------------------------------------------------------------ writing

    def _ship(self, job: PrefillJob, event: KvWritten, mark: StepMark) -> None:
        """Have every rank write its part."""
        order = ship_order(job.request.ticket, event, mark, self._page_size)
        for number, rank in enumerate(self._ranks):
            key = WriteKey(number, event.chunk, event.layer_group)
            job.posted_at[key] = time.monotonic()
            shipped = rank.ship(job.decode_life, order)
            self._thread.when_done(shipped, partial(self._on_shipped, job, key))

    def _on_shipped(self, job: PrefillJob, key: WriteKey, done: Future[Shipped]) -> None:
        del job.posted_at[key]
        error = done.exception()
        if isinstance(error, TransferError):
            if error.stage == "connection":  # also of a job that ends for another reason
                self._correspondence.connection_broke(job, error.reason)
            self._fail(job, error.stage, error.reason)
            if error.stage == "connection":
                self._peers.distrust(job.decode, error.reason)
        elif error is not None:
            raise error
        else:
            shipped = done.result()
            job.done[key] = shipped.notification
            job.bytes_sent += shipped.size_bytes
            self._counters["bytes_sent"] += shipped.size_bytes
            self._counters["writes_done"] += 1
        self._advance(job)

    # ------------------------------------------------------------------------------------------------- ending

    def _cancel(self, job: PrefillJob) -> None:
        if job.state not in (JobState.ENDING, JobState.SHIPPED):
            self._counters["jobs_cancelled"] += 1
            self._end(job)
        self._advance(job)

    def _fail(self, job: PrefillJob, stage: str, reason: str) -> None:
        if job.state in (JobState.ENDING, JobState.SHIPPED):
            return
        job.failure = Failure(stage, reason)
        self._counters[f"failures_{stage}"] += 1
        self._metrics.job_failed(job, stage, reason)
        self._end(job)

    def _end(self, job: PrefillJob) -> None:
        """Post nothing more; the engine sets the pages aside while a write still reads them."""
        job.move(JobState.ENDING)
        job.waiting.clear()
        if not job.engine_ended:
            self._engine.abort(job.engine_id, job.request.attempt, writer_granted=job.in_flight > 0)

    def _advance(self, job: PrefillJob) -> None:
        """Do what the job's facts allow by now."""
        if job.state is JobState.GRANTED and job.all_written and job.computed:
            self._finish(job)
        if job.state is JobState.ENDING and job.in_flight == 0 and not job.told:
            job.told = True
            self._tell_end(job)
        if not job.engine_ended or job.in_flight > 0 or job.key not in self._jobs:
            return
        if job.quarantined:
            self._engine.release_quarantined(job.engine_id, job.request.attempt)
        del self._jobs[job.key]

    def _finish(self, job: PrefillJob) -> None:
        job.move(JobState.SHIPPED)
        self._engine.release(job.engine_id, job.request.attempt)
        self._correspondence.shipped(job)
        tail_s = job.transfer_tail_s()
        finished = PrefillFinished(
            *job.key, job.cached_tokens, job.queue_s, job.compute_s, tail_s, job.bytes_sent
        )
        self._node.send(job.router, finished)
        self._metrics.job_shipped(job, tail_s)

    def _tell_end(self, job: PrefillJob) -> None:
        """No write of the job is under way here any more: say so to whoever waits for it."""
        self._correspondence.ended(job)
        if job.failure is not None:
            failed = PrefillFailed(*job.key, job.failure.stage, job.failure.reason)
            self._node.send(job.router, failed)

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A link's session ended: work for that router or into that decode worker is pointless."""
        for job in list(self._jobs.values()):
            if job.router == peer:
                self._cancel(job)
            elif job.decode == peer:
                self._fail(job, "transfer", f"link to {peer.worker_id} ended: {reason}")
                self._advance(job)

    def tick(self) -> None:
        """Give up on permissions that do not come, and see to it that no write is under way for ever."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            self._correspondence.repeat_overdue(job)
            if job.state is JobState.ANNOUNCED and now - job.announced_at > self._settings.lease_s:
                self._fail(job, "reserve", f"no permission to write within {self._settings.lease_s:g} s")
                self._advance(job)
