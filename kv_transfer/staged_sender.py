"""The writing side of staging: gathers segments into slots and writes them, as slots become free.

a slot of the peer is free again when
the peer says so                its segment was spread, also one that arrived later than it should
the write was refused           nothing of it was sent
the connection was severed      of a write that failed, nobody knows what arrived, or is still to come
the peer's life is over         none of its slots is used any more
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from antiphon.kv_transfer.handshake import PeerKv, RankPages, check_order
from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.ranks import PeerLife, Shipped
from antiphon.kv_transfer.staging import (
    Segment,
    Share,
    SlotRange,
    StagingMemory,
    blocks_of,
    segments_of,
    share_bytes,
    share_of,
    share_offset,
)
from antiphon.kv_transfer.transfer_thread import Fate, TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Copies, Memory
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.rank_messages import ShipOrder
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

Landing = tuple[str, int, WriteKey, int]
"""(request id, attempt, key, part): names one segment until the peer has spread it."""


@dataclass(slots=True, eq=False)
class _Load:
    """One order under way to one life of a peer."""

    peer: PeerLife
    order: ShipOrder
    done: Callable[[TransferError | None], None]
    left: int
    error: TransferError | None = None


@dataclass(slots=True, eq=False)
class _Staged:
    """One segment under way, to one rank of a peer."""

    load: _Load
    rank: RankPages
    share: Share
    segment: Segment
    free: deque[int]
    """The peer rank's slots that nothing is in."""
    part: int
    parts: int
    slot: int = -1
    payload: bytes = b""
    writing: bool = False
    """Whether the transport is still at it."""
    repeated_at: float | None = None
    """When the peer was first told of it again, by ``time.monotonic``."""
    error: TransferError | None = None
    """Of a write that took too long, though it arrived."""


class StagedSender:
    """Ships orders of one source rank through slots. Everything but ``ship`` runs on the transfer thread.

    Args:
        memory: this rank's own slots; all of them are this object's.
        epoch: of this life of the worker.
        patience_s: how long a peer that was told again of a segment may take to say that it spread it.
    """

    def __init__(
        self,
        layouts: Mapping[str, GroupLayout],
        shard: Shard,
        memory: StagingMemory,
        transfer: TransferThread,
        layer_groups: int,
        epoch: int,
        patience_s: float,
    ) -> None:
        self._layouts = layouts
        self._shard = shard
        self._memory = memory
        self._transfer = transfer
        self._layer_groups = layer_groups
        self._epoch = epoch
        self._patience_s = patience_s
        region = memory.region
        self._slot_bytes = region.page_bytes
        self._span = Memory(region.address, region.pages * region.page_bytes, region.memory, region.device)
        self._own_free: deque[int] = deque(range(region.pages))
        self._free: dict[tuple[PeerLife, int], deque[int]] = {}
        """By life and rank of a peer: the slots there that nothing is in."""
        self._queue: deque[_Staged] = deque()
        self._landing: dict[Landing, _Staged] = {}
        self._quarantined: dict[PeerLife, list[_Staged]] = {}
        """Failed writes, by the peer in whose slots they may be, or may yet arrive."""

    def ship(
        self, peer: PeerKv, slots: SlotRange, order: ShipOrder, source_ready: Callable[[], bool]
    ) -> Future[Shipped]:
        """Carry out this rank's part; the future ends once nothing of it can touch the peer any more."""
        shipped: Future[Shipped] = Future()
        key = WriteKey(self._shard.rank, order.chunk, order.layer_group)
        identity = order.request_id, order.attempt, self._epoch, order.decode_epoch
        notification = encode(WriteDone(*identity, key))
        size = 0

        def done(error: TransferError | None) -> None:
            if error is not None:
                shipped.set_exception(error)
            else:
                shipped.set_result(Shipped(notification, size))

        def begin() -> None:
            nonlocal size
            try:
                segments = self._cut(peer, order)
            except TransferError as error:
                shipped.set_exception(error)
                return
            size = sum(segment.size_bytes for _, _, segment in segments)
            if not segments:  # the peer has the pages, or other ranks send them
                lead = peer.ranks[0].agent_name
                self._transfer.notify(lead, notification, lambda outcome: done(_broken(outcome)))
                return
            life = PeerLife(peer.worker_id, peer.epoch)
            load = _Load(life, order, done, len(segments))
            for part, (rank, share, segment) in enumerate(segments):
                every = range(slots.first, slots.first + slots.count)
                free = self._free.setdefault((life, rank.shard.rank), deque(every))
                self._queue.append(_Staged(load, rank, share, segment, free, part, len(segments)))
            self._pump()

        self._transfer.when(source_ready, begin, shipped.set_exception)
        return shipped

    def slot_free(self, sender: str, message: SlotFree) -> None:
        """The peer has spread a segment, and perhaps said so before.

        Raises:
            TransferError: stage ``transfer``; the segment is in another slot, or with another peer.
        """
        landing = message.request_id, message.attempt, message.key, message.part
        staged = self._landing.get(landing)
        if staged is None:
            return
        if (sender, message.slot) != (staged.rank.agent_name, staged.slot):
            where = f"in slot {staged.slot} of {staged.rank.agent_name}"
            raise TransferError("transfer", f"slot {message.slot} is free of what is {where}")
        del self._landing[landing]
        self._transfer.expect(-1)
        staged.free.append(staged.slot)
        self._ended(staged, staged.error)

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        """Tell the peer once more of segments of these keys that it has not said to have spread.

        A peer that was told again and does not answer has lost its connection to us, or we ours to it.
        """
        now = time.monotonic()
        for landing, staged in list(self._landing.items()):
            if landing[:2] != (request_id, attempt) or landing[2] not in keys or staged.writing:
                continue
            staged.repeated_at = staged.repeated_at or now
            if now - staged.repeated_at > self._patience_s:
                reason = f"{staged.rank.agent_name} does not say that it has spread what it was written"
                self._given_up(landing, staged, reason)
                continue
            self._transfer.notify(
                *(staged.rank.agent_name, staged.payload, partial(self._repeated, landing, staged)),
                # Of a slot that was given back meanwhile it would spread whatever comes to lie there.
                still=partial(self._is_landing, landing, staged),
            )

    def severed(self, peer: PeerLife) -> None:
        """The peer has ended every connection of ours and spreads nothing that came over one of them."""
        for staged in self._quarantined.pop(peer, []):
            staged.free.append(staged.slot)
        over = TransferError("transfer", "the peer severed its connection and did not say what it had spread")
        waiting = [
            (landing, staged)
            for landing, staged in self._landing.items()
            if staged.load.peer == peer and not staged.writing
        ]
        for landing, staged in waiting:
            if self._landing.get(landing) is staged:
                self._lost(landing, over, Fate.NOT_SENT)
        self._pump()

    def forget(self, peer: PeerLife) -> None:
        """This life of a peer is over: nobody will say what became of its segments, and nobody asks."""
        gone = TransferError("transfer", f"{peer.worker_id} is gone")
        queued = [staged for staged in self._queue if staged.load.peer == peer]
        self._queue = deque(staged for staged in self._queue if staged.load.peer != peer)
        landing = {key: staged for key, staged in self._landing.items() if staged.load.peer == peer}
        for key in landing:
            del self._landing[key]
            self._transfer.expect(-1)
        for rank in [rank for rank in self._free if rank[0] == peer]:
            del self._free[rank]
        self._quarantined.pop(peer, None)
        for staged in (*queued, *landing.values()):
            self._ended(staged, gone)

    def _cut(self, peer: PeerKv, order: ShipOrder) -> list[tuple[RankPages, Share, Segment]]:
        """All segments of an order, for every rank of the peer.

        Raises:
            TransferError: see ``check_order``.
        """
        check_order(peer, order)
        found = []
        for rank in peer.ranks:
            share = share_of(self._layouts["full"], self._shard, rank.shard)
            if share is not None:
                room = min(share_bytes(rank.slot_bytes, share), self._slot_bytes)
                segments = segments_of(order, self._layouts, self._layer_groups, share, room)
                found += [(rank, share, segment) for segment in segments]
        return found

    def _pump(self) -> None:
        """Gather what there are slots for, oldest first; a peer that frees none holds up nobody else."""
        while self._own_free:
            staged = next((each for each in self._queue if each.free), None)
            if staged is None:
                return
            self._queue.remove(staged)
            own, staged.slot = self._own_free.popleft(), staged.free.popleft()
            group = staged.load.order.layer_group
            blocks = blocks_of(
                staged.segment.source, self._layouts, group, self._layer_groups, staged.share.mine
            )
            gathered = self._memory.gather(own * self._slot_bytes, blocks)
            self._transfer.when(gathered, partial(self._write, staged, own), partial(self._ended, staged))

    def _write(self, staged: _Staged, own: int) -> None:
        order, rank = staged.load.order, staged.rank
        offset = share_offset(staged.slot, rank.slot_bytes, staged.share)
        key = WriteKey(self._shard.rank, order.chunk, order.layer_group)
        message = StagedWrite(
            *(order.request_id, order.attempt, self._epoch, order.decode_epoch, key),
            part=staged.part,
            parts=staged.parts,
            source_ranks=self._shard.tensor_parallel,
            slot=staged.slot,
            offset=offset,
            pages=staged.segment.target,
        )
        staged.payload = encode(message)
        runs = np.array([[own * self._slot_bytes, offset, staged.segment.size_bytes]], dtype=np.int64)
        if rank.staging is None:
            raise RuntimeError("a rank without slots was given a segment")
        copies = [Copies(self._span, rank.staging, runs)]
        landing = order.request_id, order.attempt, key, staged.part
        self._landing[landing] = staged
        staged.writing = True
        self._transfer.expect(+1)  # of the peer's word that it has spread the segment

        def written(outcome: WriteOutcome) -> None:
            self._own_free.append(own)
            staged.writing = False
            if outcome.error is not None and self._landing.get(landing) is staged:
                if outcome.fate is Fate.LANDED:
                    staged.error = outcome.error  # the peer spreads it all the same, so it is not over yet
                else:
                    self._lost(landing, outcome.error, outcome.fate)
            self._pump()

        self._transfer.write(rank.agent_name, copies, staged.payload, written)

    def _is_landing(self, landing: Landing, staged: _Staged) -> bool:
        """Whether the peer still has to spread a segment."""
        return self._landing.get(landing) is staged

    def _repeated(self, landing: Landing, staged: _Staged, outcome: WriteOutcome) -> None:
        """A peer that cannot be told again will not answer either: its connection is broken."""
        if outcome.error is not None:
            self._given_up(landing, staged, outcome.error.reason)

    def _given_up(self, landing: Landing, staged: _Staged, reason: str) -> None:
        """No answer will come before the connection is made anew."""
        if self._is_landing(landing, staged):
            self._lost(landing, TransferError("connection", reason), Fate.UNKNOWN)

    def _lost(self, landing: Landing, error: TransferError, fate: Fate) -> None:
        """A segment will not be spread on our word; what its load has not begun need not be."""
        staged = self._landing.pop(landing)
        self._transfer.expect(-1)
        if fate is Fate.NOT_SENT:
            staged.free.append(staged.slot)
        else:
            self._quarantined.setdefault(staged.load.peer, []).append(staged)
        not_begun = [each for each in self._queue if each.load is staged.load]
        self._queue = deque(each for each in self._queue if each.load is not staged.load)
        for each in (staged, *not_begun):
            self._ended(each, error)

    def _ended(self, staged: _Staged, error: TransferError | None) -> None:
        load = staged.load
        load.left -= 1
        load.error = load.error or error
        if load.left == 0:
            load.done(load.error)
        self._pump()


def _broken(outcome: WriteOutcome) -> TransferError | None:
    """The error of a word with which no page goes: nothing else tells that its connection is broken."""
    return None if outcome.error is None else TransferError("connection", outcome.error.reason)
