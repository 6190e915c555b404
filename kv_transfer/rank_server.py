"""What a rank other than 0 does for its worker's transfers: carries out what rank 0 asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import assert_never

from antiphon.kv_transfer.endpoint import KvEndpoint
from antiphon.kv_transfer.rank_links import follower_peer
from antiphon.kv_transfer.ranks import PeerLife, Shipped
from antiphon.kv_transfer.staging import SlotRange
from antiphon.protocol.errors import HandshakeError, TransferError
from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.kv_messages import RankMemory
from antiphon.protocol.link import FAREWELL, LinkNode, LinkSettings, Peer
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
    RankReady,
    RepeatStaged,
    SeverWriter,
    ShipPages,
    WriteProbe,
    WriteSample,
)

_log = logging.getLogger(__name__)


MakeEndpoint = Callable[
    [RankMeeting, Callable[[str, bytes], None], Callable[[BaseException], None]], KvEndpoint
]
"""Makes this rank's endpoint from what rank 0 said, ``on_landed`` and ``on_failure``."""


_Outcome = Future[Shipped] | Future[bool] | Future[int] | Future[None]
"""What a call gives back, see RankKv."""


class RankServer:
    """Serves one rank's ``KvEndpoint`` to rank 0 over a link.

    Args:
        meeting: where rank 0 listens.
        on_failure: called with what makes this rank useless: its transfers died, or rank 0 is gone.
        taken_writes: writes that ended since it was last called; rank 0 exports them.
    """

    def __init__(
        self,
        role: Role,
        rank: int,
        meeting: RankMeeting,
        cluster_token: str,
        settings: LinkSettings,
        make_endpoint: MakeEndpoint,
        on_failure: Callable[[BaseException], None],
        taken_writes: Callable[[], tuple[WriteSample, ...]],
    ) -> None:
        """Raises ConfigError when the token is too short."""
        self._on_failure = on_failure
        self._taken_writes = taken_writes
        self._thread = LinkThread(f"links-{meeting.worker_id}/{rank}", self._fail)
        me = follower_peer(role, meeting.worker_id, rank, meeting.epoch)
        self._node = LinkNode(me, cluster_token, self, settings)
        self._leader = WorkerAddress(meeting.worker_id, role, meeting.epoch, meeting.endpoint)
        self._peer = Peer(role, meeting.worker_id, meeting.epoch)
        self._endpoint = make_endpoint(meeting, self._landed, self._fail)
        self._memory: RankMemory | None = None

    def start(self) -> None:
        """Register the pages, then tell rank 0.

        Raises:
            TransferError: the transport cannot be opened, or cannot take the memory.
        """
        self._memory = self._endpoint.start()
        self._thread.start()
        self._thread.call(self._node.start)
        self._thread.call(self._node.connect, self._leader)

    def hang_up(self) -> None:
        """Begin to end the link, of which rank 0 hears at once; ``stop`` does the rest. From any thread."""
        if self._memory is not None:
            self._thread.post(self._node.close)

    def stop(self) -> None:
        """End the link and the transfers. Harmless when repeated."""
        if self._memory is not None:
            self._memory = None
            self._thread.call(self._node.close)
            self._endpoint.stop()
            self._thread.stop()

    def _landed(self, sender: str, notification: bytes) -> None:
        self._node.send(self._peer, RankLanded(sender, notification))

    def _fail(self, error: BaseException) -> None:
        self.hang_up()
        self._on_failure(error)

    def on_up(self, peer: Peer) -> None:
        """See LinkHandler."""
        if self._memory is not None:
            self._node.send(peer, RankReady(self._memory))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """See LinkHandler."""
        if not reason.startswith(FAREWELL):
            _log.warning("the link to rank 0 ended: %s", reason)
        self._node.disconnect(peer, "over")

    def on_message(self, peer: Peer, message: object) -> None:
        """See LinkHandler."""
        if isinstance(message, ExpectWrites):
            self._endpoint.expect(message.change)
        elif isinstance(message, RepeatStaged):
            self._endpoint.repeat(message.request_id, message.attempt, frozenset(message.keys))
        elif isinstance(message, RankCall):
            self._answer(peer, message.call, self._carry_out(message))
        else:
            _log.warning("%s sent a %s to another rank", peer, type(message).__name__)

    def _carry_out(self, message: RankCall) -> _Outcome:
        endpoint = self._endpoint
        try:
            match message:
                case ConnectPeer():
                    life = PeerLife(message.worker_id, message.epoch)
                    staging = None if message.staging is None else SlotRange(*message.staging)
                    granted = None if message.granted is None else SlotRange(*message.granted)
                    them = message.tensor_parallel, message.ranks, staging
                    return endpoint.connect(life, *them, granted=granted, severed=message.severed)
                case DisconnectPeer():
                    return endpoint.disconnect(PeerLife(message.worker_id, message.epoch))
                case ClearProbe():
                    return endpoint.clear_probe()
                case WriteProbe():
                    return endpoint.write_probe(PeerLife(message.worker_id, message.epoch), message.pages)
                case CheckProbe():
                    return endpoint.check_probe(PeerLife(message.worker_id, message.epoch))
                case ShipPages():
                    return endpoint.ship(PeerLife(message.worker_id, message.epoch), message.order)
                case SeverWriter():
                    return endpoint.sever(PeerLife(message.worker_id, message.epoch))
                case DropWriter():
                    return endpoint.drop_writer(PeerLife(message.worker_id, message.epoch))
                case _:
                    assert_never(message)
        except HandshakeError as error:
            refused: Future[None] = Future()
            refused.set_exception(TransferError("handshake", str(error)))
            return refused

    def _answer(self, peer: Peer, call: int, future: _Outcome) -> None:
        def done(ended: _Outcome) -> None:
            error = ended.exception()
            if isinstance(error, TransferError):
                self._node.send(
                    peer, RankAnswer(call, error.stage, error.reason, writes=self._taken_writes())
                )
            elif error is not None:
                self._fail(error)
            else:
                result, writes = ended.result(), self._taken_writes()
                if isinstance(result, Shipped):
                    answer = RankAnswer(call, "", "", result.notification, result.size_bytes, writes=writes)
                elif isinstance(result, bool):
                    answer = RankAnswer(call, mapped=result, writes=writes)
                else:
                    answer = RankAnswer(call, size_bytes=result or 0, writes=writes)
                self._node.send(peer, answer)

        future.add_done_callback(done)
