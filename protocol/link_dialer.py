"""One address that a node keeps connected: dial, greet, and dial again whenever the connection ends."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Protocol

import zmq

from antiphon.protocol.errors import WireError
from antiphon.protocol.identity import WorkerAddress
from antiphon.protocol.link_settings import LinkSettings
from antiphon.protocol.link_socket import DialledSocket
from antiphon.protocol.link_wire import ClusterKeys, Frame, FrameKind, Greeting, Peer, unpack

FAREWELL_LINGER_MS = 200
"""How long a closing socket may take to get its last frames out."""


class DialerOwner(Protocol):
    """The node behind a dialer: it owns the session that the dialer's connections carry."""

    def greeting_of(self, dialer: Dialer) -> bytes:
        """The greeting that a new connection begins with."""

    def on_dialer_answered(self, dialer: Dialer, greeting: Greeting) -> bool:
        """The peer answered; False when its answer does not belong to this session."""

    def on_dialer_frame(self, dialer: Dialer, frame: Frame) -> None:
        """A frame of the established session."""

    def on_dialer_down(self, dialer: Dialer) -> None:
        """The connection is gone; another one will be made."""


class Dialer:
    """Connections to one life of one worker, one after the other. Lives on the node's loop."""

    def __init__(
        self,
        owner: DialerOwner,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClusterKeys,
        address: WorkerAddress,
        settings: LinkSettings,
    ) -> None:
        self.peer = Peer(address.role, address.worker_id, address.epoch)
        self.session_id = _draw_session_id()
        self.detail = "not connected yet"
        """Why there is no session, for people."""
        self._owner = owner
        self._context = context
        self._keys = keys
        self._endpoint = address.endpoint
        self._settings = settings
        self._socket: DialledSocket | None = None
        self._greeted_at: float | None = None  # None once the greeting was answered
        self._backoff_s = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    def send(self, frame: bytes) -> bool:
        """False when there is no connection."""
        return self._socket is not None and self._socket.send(frame)

    def dial(self) -> None:
        """Connect and greet."""
        self._retry = None
        if self._closed:
            return
        socket = DialledSocket(
            self._context,
            self._keys,
            self._endpoint,
            lambda data: self._received(socket, data),
            lambda reason: self.redial(reason) if self._socket is socket else None,
        )
        self._socket = socket
        self._greeted_at = time.monotonic()
        socket.send(self._owner.greeting_of(self))

    def redial(self, reason: str, linger_ms: int = 0) -> None:
        """Drop the connection and make another one, later each time that it fails."""
        self.detail = reason
        self._hang_up(linger_ms)
        self._owner.on_dialer_down(self)
        if not self._closed:
            settings = self._settings
            self._backoff_s = min(max(self._backoff_s * 2, settings.first_backoff_s), settings.max_backoff_s)
            self._retry = asyncio.get_running_loop().call_later(self._backoff_s, self.dial)

    def begin_new_session(self, reason: str) -> None:
        """The session is over: go on with a fresh one."""
        self.session_id = _draw_session_id()
        self.redial(reason, FAREWELL_LINGER_MS)

    def check_answer(self, now: float) -> None:
        """Redial when the greeting was not answered in time."""
        if self._greeted_at is not None and now - self._greeted_at > self._settings.greeting_timeout_s:
            self.redial(f"no answer from {self._endpoint}: gone, or another cluster token")

    def close(self, linger_ms: int) -> None:
        """Hang up for good."""
        self._closed = True
        self._hang_up(linger_ms)

    def _hang_up(self, linger_ms: int) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None
        self._greeted_at = None

    def _received(self, socket: DialledSocket, data: bytes) -> None:
        if self._socket is not socket:
            return
        try:
            frame = unpack(data)
            if frame.kind is FrameKind.GREETING:
                self._answered(frame)
                return
        except WireError as error:
            self.redial(str(error))
            return
        if frame.kind is FrameKind.REFUSAL:
            self.redial(f"refused by {self.peer}: {frame.payload.decode(errors='replace')}")
        elif self._greeted_at is None:
            self._owner.on_dialer_frame(self, frame)

    def _answered(self, frame: Frame) -> None:
        greeting, peer = self._keys.check(frame.payload, from_listening=True)
        if peer != self.peer:
            raise WireError(f"{self._endpoint}: expected {self.peer}, found {peer}")
        if self._owner.on_dialer_answered(self, greeting):
            self._greeted_at, self._backoff_s, self.detail = None, 0.0, ""


def _draw_session_id() -> int:
    return secrets.randbits(62) | 1
