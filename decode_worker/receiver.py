"""KV on its way in: who may write which reservation, what has arrived, and when to stop waiting.

    state       of one attempt, entered when             leaves to
    RESERVED    its pages are held, nobody may write     RECEIVING, (gone)
    RECEIVING   one writer was granted                   (gone: complete or lost), STOPPING, ABANDONED
    STOPPING    the writer was told to stop; still       (gone: lost), ABANDONED
                wanted, to be written by another
    ABANDONED   its request has ended or moved to        (gone: released)
                other pages; the writer has not stopped

Pages of a STOPPING or ABANDONED attempt belong to nobody else: they are quarantined until the writer says
that it has drained, or its life is known to be over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from antiphon.kv_transfer.checksum import crc32_of
from antiphon.kv_transfer.completion import CompletionSet, Tick
from antiphon.kv_transfer.leases import WriteLeases, Writer
from antiphon.kv_transfer.transport import Memory
from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    CancelWrites,
    GrantWrites,
    MissingWrites,
    RefuseWrites,
    WriteChecksum,
    WriteDone,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import Message

_log = logging.getLogger(__name__)
_MAX_TIMES_ASKED = 2

Key = tuple[str, int]
"""(request id, attempt)."""


class ReceiveState(StrEnum):
    """See the table above."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    STOPPING = "stopping"
    ABANDONED = "abandoned"


_MOVES = {
    ReceiveState.RESERVED: {ReceiveState.RECEIVING},
    ReceiveState.RECEIVING: {ReceiveState.STOPPING, ReceiveState.ABANDONED},
    ReceiveState.STOPPING: {ReceiveState.ABANDONED},
    ReceiveState.ABANDONED: set(),
}


@dataclass(slots=True)
class _Receive:
    state: ReceiveState
    writes: CompletionSet | None = None
    announcement: int = 0
    """Of the writer, that was granted."""
    granted_at: float = 0.0
    stopping_since: float = 0.0
    cancelled_at: float | None = None
    """When the writer was told to stop."""

    def move(self, state: ReceiveState) -> None:
        if state not in _MOVES[self.state]:
            raise IllegalTransition(f"receive: {self.state} -> {state}")
        self.state = state


class ReceiveOutcomes(Protocol):
    """What becomes of attempts; called on the link thread."""

    def kv_complete(self, key: Key, transfer_s: float) -> None:
        """Every announced write has arrived."""

    def kv_lost(self, key: Key) -> None:
        """It will not arrive, and its writer certainly writes no more: the same pages may be used again."""

    def kv_stuck(self, key: Key) -> None:
        """The writer neither finishes nor says that it stopped; the attempt is ABANDONED from now on."""

    def pages_released(self, key: Key) -> None:
        """The writer of an ABANDONED attempt writes no more."""


class KvReceiver:
    """All attempts of one decode worker whose KV a peer is to write. Lives on the link thread."""

    def __init__(
        self,
        epoch: int,
        timeout_s: float,
        send: Callable[[Peer, Message], bool],
        outcomes: ReceiveOutcomes,
        expect: Callable[[int], None],
        counters: Counter[str],
        spans: Mapping[str, Memory],
        clock: Callable[[], float] = time.monotonic,
        *,
        sever: Callable[[Writer], None],
    ) -> None:
        """``sever`` begins to end a writer's connections; ``on_severed`` follows."""
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._send = send
        self._outcomes = outcomes
        self._expect = expect
        self._counters = counters
        self._spans = spans
        self._clock = clock
        self._receives: dict[Key, _Receive] = {}
        self._leases = WriteLeases()
        self._sever = sever
        self._severing: dict[Writer, set[Key]] = {}
        """Attempts whose writer lost its connection, while what it sent may still arrive."""
        self._writer_peers: dict[Writer, Peer] = {}

    def __len__(self) -> int:
        return len(self._receives)

    def state(self, key: Key) -> ReceiveState | None:
        """Where an attempt stands; None when nothing is on its way."""
        receive = self._receives.get(key)
        return receive.state if receive is not None else None

    # ----------------------------------------------------------------------------------- the request's side

    def reserve(self, key: Key) -> None:
        """Pages are held for this attempt; a writer may now ask."""
        self._receives[key] = _Receive(ReceiveState.RESERVED)

    def abandon(self, key: Key) -> bool:
        """The attempt is not wanted any more. Whether a writer may still write its pages.

        If so, ``pages_released`` follows. A reservation without a writer is simply forgotten.
        """
        receive = self._receives.get(key)
        if receive is None:
            return False
        if receive.state is ReceiveState.RESERVED:
            self._forget(key)
            return False
        if receive.state is not ReceiveState.ABANDONED:
            receive.move(ReceiveState.ABANDONED)
            self._cancel(key)
        return True

    # ------------------------------------------------------------------------------------ the writer's side

    def on_announce(self, peer: Peer, message: AnnounceWrites) -> None:
        """A writer asks for permission, or says that it is still at work."""
        key, writer = (message.request_id, message.attempt), Writer(peer.worker_id, peer.epoch)
        if message.decode_epoch != self._epoch or message.prefill_epoch != peer.epoch:
            self._counters["stale_messages"] += 1
            return
        receive = self._receives.get(key)
        lease = self._leases.get(*key)
        now, answer = self._clock(), (*key, self._epoch, message.announcement)
        if lease is not None and lease.writer == writer and not lease.cancelled and receive is not None:
            changed = receive.writes is not None and receive.writes.expected != frozenset(message.writes)
            if changed or receive.announcement != message.announcement:
                # It began the attempt anew, maybe with another part of it cached: this set may never be full,
                # or be full of what was written before, while the same pages are written again.
                self._counters["announcements_changed"] += 1
                self._send(peer, RefuseWrites(*answer, "other writes were announced before"))
                self._stop_writer(key, receive)
                return
            if receive.writes is not None:
                receive.writes.renew(now)
            self._send(peer, GrantWrites(*answer))
        elif receive is None or receive.state is not ReceiveState.RESERVED:
            reason = "the reservation is gone" if receive is None else f"the reservation is {receive.state}"
            self._counters["grants_refused"] += 1
            self._send(peer, RefuseWrites(*answer, reason))
        elif not message.writes:
            self._send(peer, RefuseWrites(*answer, "no writes were announced"))
        else:
            self._leases.grant(*key, writer)
            self._writer_peers[writer] = peer
            receive.writes, receive.granted_at = CompletionSet(message.writes, self._timeout_s, now), now
            receive.announcement = message.announcement
            receive.move(ReceiveState.RECEIVING)
            self._expect(+1)
            self._send(peer, GrantWrites(*answer))

    def on_write_done(self, writer: Writer, message: WriteDone) -> None:
        """A write's notification arrived over the transport."""
        key = message.request_id, message.attempt
        if message.decode_epoch != self._epoch or message.prefill_epoch != writer.epoch:
            self._counters["stale_messages"] += 1
            return
        receive, lease = self._receives.get(key), self._leases.get(*key)
        if receive is None or receive.writes is None or lease is None or lease.writer != writer:
            self._counters["notifications_late"] += 1
            return
        if message.checksum is not None and not self._intact(message.checksum):
            self._counters["checksum_mismatches"] += 1
            _log.error("a write of %s attempt %d arrived damaged", *key)
            if receive.state is ReceiveState.RECEIVING:
                self._stop_writer(key, receive)
            return
        tick = receive.writes.tick(message.key, self._clock(), message.part, message.parts)
        if tick is not Tick.NEW:
            self._counters[f"notifications_{tick.value}"] += 1
        elif receive.writes.complete and receive.state is ReceiveState.RECEIVING:
            self._leases.end(*key, writer)
            transfer_s = self._clock() - receive.granted_at
            self._forget(key)
            self._outcomes.kv_complete(key, transfer_s)

    def on_failed(self, peer: Peer, message: WritesFailed) -> None:
        """The writer gave up and writes no more."""
        _log.warning(
            "KV of %s attempt %d will not come: %s: %s",
            message.request_id,
            message.attempt,
            message.stage,
            message.reason,
        )
        key, writer = (message.request_id, message.attempt), Writer(peer.worker_id, peer.epoch)
        lease = self._leases.get(*key)
        mine = message.decode_epoch == self._epoch and message.prefill_epoch == peer.epoch
        if message.stage == "connection" and mine and lease is not None and lease.writer == writer:
            # Its end of the connection is broken; what it had sent by then may be under way all the same.
            # While one is under way the writer is not welcomed, so it cannot have lost a newer connection.
            if writer in self._severing:
                self._severing[writer].add(key)
            else:
                self._severing[writer] = {key}
                self._sever(writer)
        else:
            self._writer_ended(peer, message)

    def on_severed(self, writer: Writer) -> None:
        """Nothing that this writer sent over a broken connection can arrive any more."""
        for key in sorted(self._severing.pop(writer, ())):
            if self._leases.end(*key, writer):
                self._lease_over(key)

    def on_drained(self, peer: Peer, message: WritesDrained) -> None:
        """The writer was told to stop and has."""
        self._writer_ended(peer, message)

    def _writer_ended(self, peer: Peer, message: WritesFailed | WritesDrained) -> None:
        key = message.request_id, message.attempt
        if message.decode_epoch != self._epoch or message.prefill_epoch != peer.epoch:
            self._counters["stale_messages"] += 1
        elif key in self._severing.get(Writer(peer.worker_id, peer.epoch), ()):
            return  # it speaks for itself, not for the network
        elif self._leases.end(*key, Writer(peer.worker_id, peer.epoch)):
            self._lease_over(key)
        else:
            self._counters["stale_messages"] += 1

    def on_writer_up(self, peer: Peer) -> None:
        """A writer's link stands (again): repeat what it may not have heard."""
        for lease in self._leases.of_writer(Writer(peer.worker_id, peer.epoch)):
            if lease.cancelled:
                self._send(peer, CancelWrites(lease.request_id, lease.attempt, self._epoch))

    def on_writer_lost(self, peer: Peer) -> None:
        """A writer's link ended: whatever it still writes is not waited for, and not trusted."""
        for lease in self._leases.of_writer(Writer(peer.worker_id, peer.epoch)):
            self._give_up((lease.request_id, lease.attempt))

    def on_living_writers(self, living: set[Writer]) -> None:
        """The supervisor says which writers live; the others certainly write no more."""
        for lease in self._leases.end_of_life(living):
            self._counters["leases_ended_by_death"] += 1
            self._lease_over((lease.request_id, lease.attempt))
        for writer in self._severing.keys() - living:
            del self._severing[writer]
        for writer in self._writer_peers.keys() - living:
            del self._writer_peers[writer]

    def overdue_writers(self, lease_s: float) -> tuple[Writer, ...]:
        """Writers that were told to stop longer than ``lease_s`` ago and have not said that they did."""
        latest = self._clock() - lease_s
        overdue = set()
        for key, receive in self._receives.items():
            lease = self._leases.get(*key)
            if lease is not None and receive.cancelled_at is not None and receive.cancelled_at < latest:
                overdue.add(lease.writer)
        return tuple(sorted(overdue))

    # ------------------------------------------------------------------------------------------------- time

    def tick(self) -> None:
        """Ask again for what is overdue; stop waiting for what was asked for in vain."""
        now = self._clock()
        for key, receive in list(self._receives.items()):
            lease = self._leases.get(*key)
            if receive.state is ReceiveState.STOPPING and now - receive.stopping_since > self._timeout_s:
                self._give_up(key)
            if receive.state is not ReceiveState.RECEIVING or receive.writes is None or lease is None:
                continue
            if not receive.writes.overdue(now):
                continue
            if receive.writes.times_asked >= _MAX_TIMES_ASKED:
                self._counters["receives_timed_out"] += 1
                self._stop_writer(key, receive)
                continue
            receive.writes.times_asked += 1
            missing = receive.writes.missing()
            self._counters["missing_writes_asked"] += len(missing)
            self._send(self._writer_peers[lease.writer], MissingWrites(*key, self._epoch, missing))

    def _stop_writer(self, key: Key, receive: _Receive) -> None:
        """Have the writer stop; once it has, the attempt counts as lost and is computed again."""
        receive.move(ReceiveState.STOPPING)
        receive.stopping_since = self._clock()
        self._cancel(key)

    def _intact(self, checksum: WriteChecksum) -> bool:
        """Whether the bytes are here as they were sent; pages of a live lease, so nobody else writes them."""
        crc = 0
        for group, offset, length in checksum.spans:
            span = self._spans.get(group)
            if span is None or not 0 <= offset < offset + length <= span.length_bytes:
                return False  # the sender speaks of memory that is not here
            crc = crc32_of(span, np.array([[offset, length]]), crc)
        return crc == checksum.crc32

    def _give_up(self, key: Key) -> None:
        """Stop waiting for a writer that cannot be asked; its pages stay set aside."""
        receive = self._receives[key]
        if receive.state is not ReceiveState.ABANDONED:
            self._counters["receives_stuck"] += 1
            receive.move(ReceiveState.ABANDONED)
            self._cancel(key)
            self._outcomes.kv_stuck(key)

    def _cancel(self, key: Key) -> None:
        writer = self._leases.cancel(*key)
        receive = self._receives[key]
        if writer is not None:
            if receive.cancelled_at is None:
                receive.cancelled_at = self._clock()
            self._send(self._writer_peers[writer], CancelWrites(*key, self._epoch))

    def _lease_over(self, key: Key) -> None:
        abandoned = self._receives[key].state is ReceiveState.ABANDONED
        self._forget(key)
        if abandoned:
            self._outcomes.pages_released(key)
        else:
            self._outcomes.kv_lost(key)

    def _forget(self, key: Key) -> None:
        if self._receives.pop(key).writes is not None:
            self._expect(-1)
