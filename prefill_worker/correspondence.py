"""What decode workers are told of jobs' writes, also of jobs that are gone by the time that they ask.

Everything runs on the link thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from antiphon.kv_transfer.endpoint import KvEndpoint
from antiphon.kv_transfer.ranks import PeerLife, RankKv
from antiphon.prefill_worker.jobs import PrefillJob
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    MissingWrites,
    WriteKey,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import LinkNode, Peer

_log = logging.getLogger(__name__)
_REMEMBERED_JOBS = 4096
T = TypeVar("T")

Key = tuple[str, int]
"""(request id, attempt)."""


class Correspondence:
    """Speaks of writes to decode workers; changes no job.

    Args:
        endpoint: rank 0's, the first of ``ranks``.
        patience_s: a write that was posted longer ago is not said to be still coming.
        distrust: called with a peer to which another connection must be made, and why.
    """

    def __init__(
        self,
        node: LinkNode,
        endpoint: KvEndpoint,
        ranks: Sequence[RankKv],
        counters: Counter[str],
        patience_s: float,
        distrust: Callable[[Peer, str], None],
    ) -> None:
        self._node = node
        self._endpoint = endpoint
        self._ranks = ranks
        self._counters = counters
        self._patience_s = patience_s
        self._distrust = distrust
        self._epoch = node.me.epoch
        self._shipped: OrderedDict[Key, tuple[PeerLife, dict[WriteKey, bytes]]] = OrderedDict()
        """Notifications of shipped jobs: a lost one can be repeated after the pages were given back."""
        self._cut_off: OrderedDict[Key, str] = OrderedDict()
        """Jobs one of whose writes ended with its connection, and how: bytes of it may arrive even now."""

    def announce(self, job: PrefillJob) -> None:
        """Ask for permission to write, or say that the job is still at work."""
        decode_epoch = job.request.ticket.decode_epoch
        me, writes = self._node.me.worker_id, sorted(job.keys)
        message = AnnounceWrites(*job.key, me, self._epoch, decode_epoch, job.announcement, writes)
        self._node.send(job.decode, message)

    def missing(self, peer: Peer, message: MissingWrites, job: PrefillJob | None) -> None:
        """Repeat what is done; for the rest, say that it is still coming, or that it never will."""
        self._counters["missing_writes_asked"] += len(message.keys)
        key = message.request_id, message.attempt
        if job is not None:
            self._repeat_staged(key, frozenset(message.keys))
            life, notifications = job.decode_life, job.done
            if job.still_coming(message.keys, self._patience_s):
                self.announce(job)
        elif key in self._shipped:
            life, notifications = self._shipped[key]
        else:
            reason = "this worker does not know the request any more"
            self._node.send(peer, WritesFailed(*key, self._epoch, message.decode_epoch, "notify", reason))
            return
        for write in message.keys:
            if write in notifications:
                self._counters["notifications_repeated"] += 1
                self._endpoint.notify(life, notifications[write]).add_done_callback(_repeated)

    def repeat_overdue(self, job: PrefillJob) -> None:
        """Tell again of what was staged long ago, which a decode worker that waits no more does not ask for.

        Without that a word that was lost would keep the job, its pages and the slots for ever.
        """
        now = time.monotonic()
        late = job.long_under_way(self._patience_s, now)
        if late:
            job.repeated_at = now
            self._repeat_staged(job.key, late)

    def connected_anew(self, job: PrefillJob) -> None:
        """Tell again of what was staged before the decode worker took anything over a new connection."""
        if job.in_flight:
            self._repeat_staged(job.key, frozenset(job.posted_at))

    def _repeat_staged(self, key: Key, writes: frozenset[WriteKey]) -> None:
        for rank in self._ranks:
            rank.repeat(*key, writes)

    def shipped(self, job: PrefillJob) -> None:
        """Every write of a job is done: remember what was said of them."""
        _remember(self._shipped, job.key, (job.decode_life, job.done))

    def connection_broke(self, job: PrefillJob, reason: str) -> None:
        """A write of a job ended with its connection, also of one that ends for another reason."""
        _remember(self._cut_off, job.key, reason)

    def ended(self, job: PrefillJob) -> None:
        """No write of a job that was not shipped is under way here any more."""
        decode_epoch, cut_off = job.request.ticket.decode_epoch, job.key in self._cut_off
        if job.failure is not None and job.announced and not cut_off:
            stage, reason = job.failure.stage, job.failure.reason
            self._node.send(job.decode, WritesFailed(*job.key, self._epoch, decode_epoch, stage, reason))
        if job.drain_asked or (job.announced and (job.failure is None or cut_off)):
            self.stopped(job.decode, job.key, decode_epoch)

    def stopped(self, decode: Peer, key: Key, decode_epoch: int) -> None:
        """Never say that a job has drained whose connection broke: the network may hold what it sent."""
        reason = self._cut_off.get(key)
        if reason is None:
            self._node.send(decode, WritesDrained(*key, self._epoch, decode_epoch))
        else:
            self._node.send(decode, WritesFailed(*key, self._epoch, decode_epoch, "connection", reason))
            self._distrust(decode, reason)  # it will end whatever connection we have by now


def _remember(memory: OrderedDict[Key, T], key: Key, value: T) -> None:
    memory[key] = value
    if len(memory) > _REMEMBERED_JOBS:
        memory.popitem(last=False)


def _repeated(done: Future[None]) -> None:
    """A failure shows as the same write being missed again."""
    error = done.exception()
    if error is not None:
        _log.warning("a repeated notification failed: %s", error)
