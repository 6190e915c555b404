"""ZeroMQ sockets on an asyncio loop: a listening ROUTER and dialled DEALERs that report their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from antiphon.protocol.link_wire import ClusterKeys

MAX_FRAME_BYTES = 64 * 1024 * 1024
_RECEIVE_BUDGET = 256
_NEVER_MS = 24 * 3600 * 1000
"""Longer than a socket is kept whose connection is gone."""
_DOWN_EVENTS = {
    zmq.EVENT_DISCONNECTED: "connection lost",
    zmq.EVENT_CLOSED: "connection refused",
    zmq.EVENT_CONNECT_RETRIED: "connection refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "encrypted handshake failed: another cluster token, or no link",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "encrypted handshake failed: not this protocol, or another token",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "encrypted handshake failed: another cluster token",
}


class SocketPump:
    """Delivers a socket's messages to a callback on the loop.

    ZeroMQ's file descriptor is edge-triggered: it must be drained whenever it fires and looked at again after
    every send, which is what ``_drain_some`` and ``send`` do.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_parts: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._descriptor = cast(int, socket.getsockopt(zmq.FD))
        self._closed = False
        self._drain_scheduled = False
        self._loop.add_reader(self._descriptor, self._drain_some)
        self._schedule_drain()

    def send(self, parts: list[bytes]) -> None:
        """Queue a message in the socket; raises zmq.ZMQError when the route is gone."""
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        self._schedule_drain()

    def close(self, linger_ms: int = 0) -> None:
        """Stop delivering and close the socket."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=linger_ms)

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain_later)

    def _drain_later(self) -> None:
        self._drain_scheduled = False
        self._drain_some()

    def _drain_some(self) -> None:
        for _ in range(_RECEIVE_BUDGET):
            if not self._take_one():
                return
        self._schedule_drain()

    def drain(self) -> None:
        """Deliver everything that has arrived, now."""
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        if self._closed:
            return False
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_parts(parts)
        return True


def _tuned(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    """A socket without limits of its own: the session bounds what is unacknowledged."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int("[" in address))
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    return socket


class ListeningSocket:
    """A bound ROUTER: one route per connection."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClusterKeys,
        host: str,
        port: int,
        on_frame: Callable[[bytes, bytes], None],
    ) -> None:
        bracketed = f"[{host}]" if ":" in host else host
        socket = _tuned(context, zmq.ROUTER, bracketed)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        keys.secure(socket, listening=True)
        try:
            socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(error.errno, f"cannot listen on {bracketed}:{port}: {error.strerror}") from error
        self.endpoint = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._on_frame = on_frame
        self._pump = SocketPump(socket, self._received)

    def _received(self, parts: list[bytes]) -> None:
        if len(parts) == 2:  # anything else was not sent by a link
            self._on_frame(parts[0], parts[1])

    def send(self, route: bytes, frame: bytes) -> bool:
        """False when nobody is connected under this route any more."""
        try:
            self._pump.send([route, frame])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening."""
        self._pump.close(linger_ms)


class DialledSocket:
    """One connection attempt and the connection it becomes; never reconnects by itself."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClusterKeys,
        endpoint: str,
        on_frame: Callable[[bytes], None],
        on_down: Callable[[str], None],
    ) -> None:
        socket = _tuned(context, zmq.DEALER, endpoint)
        # With -1, libzmq would throw away what had arrived and was not yet read when the connection ended.
        socket.set(zmq.RECONNECT_IVL, _NEVER_MS)
        keys.secure(socket, listening=False)
        self._socket = socket
        self._on_down = on_down
        self._down = False
        monitor = socket.get_monitor_socket(sum(_DOWN_EVENTS))
        self._monitor = SocketPump(monitor, self._monitored)
        self._pump = SocketPump(socket, lambda parts: on_frame(parts[-1]))
        socket.connect(endpoint)

    def _monitored(self, parts: list[bytes]) -> None:
        event: dict[str, Any] = dict(parse_monitor_message(parts))
        reason = _DOWN_EVENTS.get(event["event"])
        if reason is not None and not self._down:
            self._pump.drain()  # what arrived before the end counts, a farewell above all
        if reason is not None and not self._down:
            self._down = True
            self._on_down(reason)

    def send(self, frame: bytes) -> bool:
        """False when the connection is gone."""
        if self._down:
            return False
        try:
            self._pump.send([frame])
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection."""
        self._down = True
        # In this order: libzmq's own thread waits for whoever reads its events, for ever if nobody does.
        self._socket.disable_monitor()
        self._monitor.close()
        self._pump.close(linger_ms)
