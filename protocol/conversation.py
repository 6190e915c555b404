"""A session in use: its numbering behind a lock, and whatever connection carries it at the moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from antiphon.protocol.codec import encode
from antiphon.protocol.link_settings import LinkSettings
from antiphon.protocol.link_wire import Frame, FrameKind, Peer, pack
from antiphon.protocol.messages import Heartbeat
from antiphon.protocol.session import Session, SessionOverflow

_ACKNOWLEDGE_EVERY = 64
_ACKNOWLEDGE_EVERY_BYTES = 1024 * 1024
"""A burst of large messages would else fill the sender's bound until the next heartbeat, though taken."""


class Conversation:
    """One peer's session. ``queue`` may be called from any thread, everything else on the node's loop.

    Attributes:
        transmit: puts a frame on the connection, False when that is gone; None while there is none.
        heard_at, sent_at: monotonic seconds of the last frame in each direction.
        route: names the connection at a listening socket; empty at the dialling end.
        overflowed: why the peer must be lost, once it does not keep up.
    """

    def __init__(
        self,
        peer: Peer,
        session_id: int,
        own_epoch: int,
        settings: LinkSettings,
        transmit: Callable[[bytes], bool],
    ) -> None:
        self.peer = peer
        self.session_id = session_id
        self.transmit: Callable[[bytes], bool] | None = transmit
        self.heard_at = time.monotonic()
        self.sent_at = 0.0
        self.route = b""
        self.overflowed: str | None = None
        self._heartbeat_payload = encode(Heartbeat(own_epoch))
        self._session = Session(settings.max_unacknowledged, settings.max_unacknowledged_bytes)
        self._lock = threading.Lock()

    def queue(self, payload: bytes) -> bool:
        """Add a message to be sent; False once the peer does not keep up."""
        with self._lock:
            if self.overflowed is not None:
                return False
            try:
                self._session.queue(payload)
            except SessionOverflow as error:
                self.overflowed = f"does not keep up: {error}"
        return True

    def backlog_bytes(self) -> int:
        """Of the messages that the peer has not acknowledged."""
        with self._lock:
            return self._session.unacknowledged_bytes

    def take(self, frame: Frame) -> bool:
        """Note a frame's acknowledgement and number; whether it holds a message that is new.

        Raises:
            WireError: the peer's numbers make no sense.
        """
        self.heard_at = time.monotonic()
        with self._lock:
            self._session.acknowledge(frame.acknowledged)
            return frame.kind is FrameKind.MESSAGE and self._session.accept(frame.number, len(frame.payload))

    def received(self) -> int:
        """Number of the last message taken, to be told to the peer now."""
        with self._lock:
            return self._session.tell()

    def resume(self, transmit: Callable[[bytes], bool], peer_received: int) -> None:
        """Go on over a new connection with what the peer has not taken.

        Raises:
            WireError: the peer claims a message that was never sent.
        """
        with self._lock:
            self._session.resume(peer_received)
        self.transmit, self.heard_at = transmit, time.monotonic()

    def acknowledge_if_due(self) -> None:
        """Let a peer that sends much forget what has arrived."""
        with self._lock:
            due = (
                self._session.untold >= _ACKNOWLEDGE_EVERY
                or self._session.untold_bytes >= _ACKNOWLEDGE_EVERY_BYTES
            )
        if due:
            self.heartbeat()

    def transmit_unsent(self) -> None:
        """Send what is queued; without a connection it waits for one."""
        if self.transmit is None:
            return
        with self._lock:
            unsent = self._session.take_unsent()
            acknowledged = self._session.tell() if unsent else 0
        for number, payload in unsent:
            if not self._put(pack(FrameKind.MESSAGE, payload, number, acknowledged)):
                return  # resume() goes back to what the peer really has

    def heartbeat(self) -> None:
        """Show life, and acknowledge."""
        self._put(pack(FrameKind.HEARTBEAT, self._heartbeat_payload, 0, self.received()))

    def farewell(self, reason: str) -> None:
        """Send what is queued, then say that the session is over. May not arrive."""
        self.transmit_unsent()
        self._put(pack(FrameKind.FAREWELL, reason.encode()))

    def _put(self, frame: bytes) -> bool:
        if self.transmit is None:
            return False
        self.sent_at = time.monotonic()
        if not self.transmit(frame):
            self.transmit = None
            return False
        return True
