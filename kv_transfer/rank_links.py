"""Rank 0's links to the other ranks of its worker: one ``RankKv`` for each of them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from antiphon.kv_transfer.ranks import PeerLife, Shipped
from antiphon.kv_transfer.staging import SlotRange
from antiphon.protocol.errors import RankLostError, TransferError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import RankMemory, WriteKey
from antiphon.protocol.link import LinkNode, LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.rank_messages import (
    CheckProbe,
    ClearProbe,
    ConnectPeer,
    DisconnectPeer,
    DropWriter,
    ExpectWrites,
    RankAnswer,
    RankCall,
    RankLanded,
    RankMeeting,
    RankMessage,
    RankReady,
    RepeatStaged,
    SeverWriter,
    ShipOrder,
    ShipPages,
    WriteProbe,
    WriteSample,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

LOOPBACK = "127.0.0.1"
"""Ranks of one worker share a host."""


def rank_name(worker_id: str, rank: int) -> str:
    """How a rank other than 0 is named on links."""
    return f"{worker_id}/{rank}"


class RemoteRank:
    """Implements ``ranks.RankKv`` for a rank in another process. Methods may be called from any thread."""

    def __init__(self, send: Callable[[RankMessage], bool], memory: RankMemory, gone: str) -> None:
        self._send = send
        self._memory = memory
        self._gone = gone
        """What to say once the rank is gone."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[RankAnswer]] = {}
        self._lost = False

    @property
    def memory(self) -> RankMemory:
        """See RankKv."""
        return self._memory

    def connect(
        self,
        peer: PeerLife,
        tensor_parallel: int,
        ranks: Sequence[RankMemory],
        staging: SlotRange | None = None,
        *,
        granted: SlotRange | None = None,
        severed: bool = False,
    ) -> Future[bool]:
        """See RankKv."""
        life, them = (peer.worker_id, peer.epoch), tuple(ranks)
        theirs, mine = (None if each is None else (each.first, each.count) for each in (staging, granted))
        return self._call(
            lambda number: ConnectPeer(
                number, *life, tensor_parallel, them, theirs, granted=mine, severed=severed
            ),
            lambda answer: answer.mapped,
        )

    def disconnect(self, peer: PeerLife) -> Future[None]:
        """See RankKv."""
        return self._call(lambda number: DisconnectPeer(number, peer.worker_id, peer.epoch), _nothing)

    def clear_probe(self) -> Future[None]:
        """See RankKv."""
        return self._call(ClearProbe, _nothing)

    def write_probe(self, peer: PeerLife, pages: dict[str, int]) -> Future[None]:
        """See RankKv."""
        return self._call(lambda number: WriteProbe(number, peer.worker_id, peer.epoch, pages), _nothing)

    def check_probe(self, writer: PeerLife) -> Future[int]:
        """See RankKv."""
        life = writer.worker_id, writer.epoch
        return self._call(lambda number: CheckProbe(number, *life), lambda answer: answer.size_bytes)

    def ship(self, peer: PeerLife, order: ShipOrder) -> Future[Shipped]:
        """See RankKv."""
        life = peer.worker_id, peer.epoch
        return self._call(
            lambda number: ShipPages(number, *life, order),
            lambda answer: Shipped(answer.notification, answer.size_bytes),
        )

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        """See RankKv."""
        self._send(RepeatStaged(request_id, attempt, tuple(sorted(keys))))

    def sever(self, writer: PeerLife) -> Future[None]:
        """See RankKv."""
        return self._call(lambda number: SeverWriter(number, writer.worker_id, writer.epoch), _nothing)

    def drop_writer(self, writer: PeerLife) -> Future[None]:
        """See RankKv."""
        return self._call(lambda number: DropWriter(number, writer.worker_id, writer.epoch), _nothing)

    def expect(self, change: int) -> None:
        """See RankKv."""
        self._send(ExpectWrites(change))

    def answered(self, answer: RankAnswer) -> None:
        """The rank carried out a call."""
        with self._lock:
            call = self._calls.pop(answer.call, None)
        if call is None:
            _log.warning("%s answered call %d, which nobody waits for", self._memory.agent_name, answer.call)
        elif answer.stage:
            call.set_exception(TransferError(answer.stage, answer.reason))
        else:
            call.set_result(answer)

    def lost(self) -> None:
        """The rank will not answer any more."""
        with self._lock:
            self._lost = True
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.set_exception(TransferError("transfer", self._gone))

    def _call(self, message: Callable[[int], RankCall], result: Callable[[RankAnswer], T]) -> Future[T]:
        answer: Future[RankAnswer] = Future()
        outcome: Future[T] = Future()

        def done(ended: Future[RankAnswer]) -> None:
            error = ended.exception()
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result(ended.result()))

        answer.add_done_callback(done)
        number = next(self._numbers)
        with self._lock:
            if not self._lost:
                self._calls[number] = answer
        if number not in self._calls or not self._send(message(number)):
            with self._lock:
                self._calls.pop(number, None)
            if not answer.done():
                answer.set_exception(TransferError("transfer", self._gone))
        return outcome


class RankLinks:
    """The listening end of a worker's own links. Callbacks come from the link thread.

    Args:
        me: rank 0's worker, in this life.
        size: ranks of the worker.
        publish: hands the other ranks a message before anything else that they hear.
        on_landed: called with (writer's agent, WriteDone) when a staged write lies in another rank's pages.
        on_lost: called once, when a rank that was there is gone.
        on_write: called with (rank, sample) of every write of another rank that arrived.
    """

    def __init__(
        self,
        me: Peer,
        size: int,
        thread: LinkThread,
        cluster_token: str,
        settings: LinkSettings,
        *,
        publish: Callable[[RankMeeting], None],
        on_landed: Callable[[str, bytes], None],
        on_lost: Callable[[BaseException], None],
        on_write: Callable[[int, WriteSample], None],
    ) -> None:
        """Raises ConfigError when the token is too short."""
        self._size = size
        self._thread = thread
        self._publish = publish
        self._on_landed = on_landed
        self._on_lost = on_lost
        self._on_write = on_write
        self._closing = False
        self._node = LinkNode(me, cluster_token, self, settings)
        self._ranks: dict[int, RemoteRank] = {}
        self._by_peer: dict[Peer, RemoteRank] = {}
        self._everyone: Future[tuple[RemoteRank, ...]] = Future()

    def open(self, timeout_s: float) -> tuple[RemoteRank, ...]:
        """Meet the other ranks, whose commands run; not from the link thread.

        Returns:
            Ranks 1 and up, in order.

        Raises:
            RankLostError: they did not all come in time, or one was lost meanwhile.
        """
        endpoint = self._thread.call(self._listen)
        me = self._node.me
        self._publish(RankMeeting(me.worker_id, me.epoch, endpoint))
        try:
            return self._everyone.result(timeout_s)
        except TimeoutError as error:
            here = sorted(self._ranks)
            raise RankLostError(
                f"of ranks 1 .. {self._size - 1} only {here} registered their pages in {timeout_s:g} s"
            ) from error

    def close(self) -> None:
        """End the links; the other ranks end their transfers then. On the link thread."""
        self._closing = True
        self._node.close()

    def _listen(self) -> str:
        self._node.start()
        return self._node.listen(LOOPBACK)

    def on_up(self, peer: Peer) -> None:
        """See LinkHandler."""

    def on_message(self, peer: Peer, message: object) -> None:
        """See LinkHandler."""
        if isinstance(message, RankReady):
            self._on_ready(peer, message.memory)
        elif isinstance(message, RankAnswer) and peer in self._by_peer:
            rank = self._by_peer[peer]
            for sample in message.writes:
                self._on_write(rank.memory.rank, sample)
            rank.answered(message)
        elif isinstance(message, RankLanded):
            self._on_landed(message.sender, message.notification)
        else:
            _log.warning("%s sent a %s to rank 0", peer, type(message).__name__)

    def _on_ready(self, peer: Peer, memory: RankMemory) -> None:
        number, worker_id = memory.rank, self._node.me.worker_id
        expected = 1 <= number < self._size and peer.worker_id == rank_name(worker_id, number)
        if not expected or number in self._ranks:
            _log.warning("%s says that it is rank %d of %s, which is not awaited", peer, number, worker_id)
            return
        gone = f"rank {number} of {worker_id} is gone"
        rank = RemoteRank(lambda message: self._node.send(peer, message), memory, gone)
        self._ranks[number] = self._by_peer[peer] = rank
        if len(self._ranks) == self._size - 1:
            self._everyone.set_result(tuple(rank for _, rank in sorted(self._ranks.items())))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """See LinkHandler."""
        if self._closing:
            return
        error = RankLostError(f"{peer.worker_id}: its link ended: {reason}")
        self._closing = True
        # First, so that the worker has hung up before the rank's writes count as ended: its GPU may go on
        # with them, and peers must not be told otherwise.
        self._on_lost(error)
        for rank in self._ranks.values():
            rank.lost()
        if not self._everyone.done():
            self._everyone.set_exception(error)


def _nothing(answer: RankAnswer) -> None:
    """What most calls give back."""


def follower_peer(role: Role, worker_id: str, rank: int, epoch: int) -> Peer:
    """Who a rank other than 0 is on links."""
    return Peer(role, rank_name(worker_id, rank), epoch)
