"""Links between the processes of a deployment: encrypted, ordered, exactly once while both ends live.

A ``LinkNode`` is one process's end of all its links. It may listen, dial others, or both. What a link gives:

- **Session.** From the first greeting until one side's lease ends, messages arrive in order and exactly once,
  across any number of reconnects (session.py). ``on_up`` opens it and ``on_lost`` ends it; both sides see the
  end, so whatever hung on it is recovered on both. A dialling node then begins a new session by itself.
- **Lease.** Any frame renews it; both ends send heartbeats.
- **Bounds.** A peer that does not acknowledge within the bound is lost, with that reason.
- **Threads.** ``send`` may be called from any thread; callbacks run on the loop, in order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from antiphon.protocol.codec import decode, encode
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.errors import ConfigError, WireError
from antiphon.protocol.identity import WorkerAddress
from antiphon.protocol.link_dialer import FAREWELL_LINGER_MS, Dialer
from antiphon.protocol.link_handler import LinkHandler
from antiphon.protocol.link_settings import LinkSettings
from antiphon.protocol.link_socket import ListeningSocket
from antiphon.protocol.link_wire import ClusterKeys, Frame, FrameKind, Greeting, Peer, pack, unpack
from antiphon.protocol.messages import Message

__all__ = ["LinkHandler", "LinkNode", "LinkSettings", "Peer"]

FAREWELL = "peer said: "
"""How the reason of ``on_lost`` begins when the peer ended the session in good order."""

_WILDCARD_HOSTS = ("0.0.0.0", "::", "*", "")


class LinkNode:
    """All links of one process. Create, ``start`` on a running loop, ``connect`` to others, ``close``."""

    def __init__(
        self, me: Peer, cluster_token: str, handler: LinkHandler, settings: LinkSettings | None = None
    ) -> None:
        """Raises ConfigError when the token is too short."""
        self.me = me
        self.counters: Counter[str] = Counter()
        self._keys = ClusterKeys(cluster_token)
        self._handler = handler
        self._settings = settings or LinkSettings()
        self._lock = threading.Lock()  # guards who is there, which any thread may ask
        self._conversations: dict[Peer, Conversation] = {}
        self._routes: dict[bytes, Conversation] = {}
        self._dialers: dict[Peer, Dialer] = {}
        self._dirty: set[Peer] = set()
        self._wake_scheduled = False
        self._started_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listening: ListeningSocket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._closed = False

    # ------------------------------------------------------------------------------------ public, loop only

    def start(self) -> None:
        """Begin keeping leases; call on the running loop that the callbacks shall use."""
        self._loop = asyncio.get_running_loop()
        self._started_context = zmq.Context()
        self._ticked_at = time.monotonic()
        self._schedule_tick()

    def listen(self, host: str, port: int = 0) -> str:
        """Accept links; returns the endpoint to publish.

        Raises:
            ConfigError: a wildcard host, which nobody else could dial.
            OSError: the port is taken or the host is not of this machine.
        """
        if host in _WILDCARD_HOSTS:
            raise ConfigError(f"bind host {host!r}: name the address that other machines reach")
        self._listening = ListeningSocket(self._context, self._keys, host, port, self._listener_frame)
        return self._listening.endpoint

    def connect(self, address: WorkerAddress) -> Peer:
        """Keep a link to this worker from now on; ``on_up`` says when it stands."""
        peer = Peer(address.role, address.worker_id, address.epoch)
        if peer not in self._dialers and not self._closed:
            self._dialers[peer] = dialer = Dialer(self, self._context, self._keys, address, self._settings)
            dialer.dial()
        return peer

    def disconnect(self, peer: Peer, reason: str) -> None:
        """End the session with a peer, and stop dialling it."""
        conversation = self._conversations.get(peer)
        if conversation is not None:
            conversation.farewell(reason)
        dialer = self._dialers.pop(peer, None)
        if dialer is not None:
            dialer.close(FAREWELL_LINGER_MS)
        if conversation is not None:
            self._lose(conversation, reason)

    def detail(self, peer: Peer) -> str:
        """Why a dialled peer is not up, for people; empty when it is."""
        if self.is_up(peer):
            return ""
        dialer = self._dialers.get(peer)
        return dialer.detail if dialer is not None else "not dialled"

    def close(self) -> None:
        """Say farewell to everyone and end. No callback comes after it."""
        if self._closed:
            return
        self._closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._flush()
        for conversation in list(self._conversations.values()):
            conversation.farewell("stopped")
        for dialer in self._dialers.values():
            dialer.close(FAREWELL_LINGER_MS)
        if self._listening is not None:
            self._listening.close(FAREWELL_LINGER_MS)
        with self._lock:
            self._conversations.clear()
        if self._started_context is not None:
            self._started_context.term()

    @property
    def _context(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._started_context is None:
            raise RuntimeError("the node was not started")
        return self._started_context

    # ------------------------------------------------------------------------------------ public, any thread

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message; False when no session stands with this peer."""
        payload = encode(message)
        conversation = self._conversations.get(peer)
        if conversation is None or not conversation.queue(payload):
            return False
        with self._lock:
            self._dirty.add(peer)
            wake = not self._wake_scheduled and not self._closed
            self._wake_scheduled = True
        if wake and self._loop is not None:
            self._loop.call_soon_threadsafe(self._flush)
        return True

    def backlog_bytes(self, peer: Peer) -> int:
        """Of the messages to this peer that it has not acknowledged; 0 when no session stands with it."""
        conversation = self._conversations.get(peer)
        return 0 if conversation is None else conversation.backlog_bytes()

    def is_up(self, peer: Peer) -> bool:
        """Whether a session with this peer stands."""
        return peer in self._conversations

    def peers(self) -> tuple[Peer, ...]:
        """Everyone a session stands with."""
        with self._lock:
            return tuple(self._conversations)

    # ------------------------------------------------------------------------------------------------ sending

    def _flush(self) -> None:
        with self._lock:
            self._wake_scheduled = False
            dirty = [self._conversations[peer] for peer in self._dirty if peer in self._conversations]
            self._dirty.clear()
        for conversation in dirty:
            if conversation.overflowed is not None:
                self._lose(conversation, conversation.overflowed)
            else:
                conversation.transmit_unsent()

    # ---------------------------------------------------------------------------------------------- receiving

    def _session_frame(self, conversation: Conversation, frame: Frame) -> None:
        """A frame of an established session."""
        try:
            message = decode(frame.payload) if conversation.take(frame) else None
        except WireError as error:
            self.counters["frames_undecodable"] += 1
            conversation.farewell(str(error))
            self._lose(conversation, str(error))
            return
        if message is not None:
            self._call(self._handler.on_message, conversation.peer, message)
        elif frame.kind is FrameKind.MESSAGE:
            self.counters["frames_repeated"] += 1
        elif frame.kind is FrameKind.FAREWELL:
            self._lose(conversation, FAREWELL + frame.payload.decode(errors="replace"))
            return
        conversation.acknowledge_if_due()

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a handler's callback on its own turn, so that its error cannot stop the socket's draining."""
        if self._loop is not None and not self._closed:
            self._loop.call_soon(callback, *arguments)

    def _open(self, peer: Peer, session_id: int, transmit: Callable[[bytes], bool]) -> Conversation:
        conversation = Conversation(peer, session_id, self.me.epoch, self._settings, transmit)
        with self._lock:
            self._conversations[peer] = conversation
        self._call(self._handler.on_up, peer)
        return conversation

    def _lose(self, conversation: Conversation, reason: str) -> None:
        with self._lock:
            if self._conversations.get(conversation.peer) is not conversation:
                return
            del self._conversations[conversation.peer]
        self._routes.pop(conversation.route, None)
        conversation.transmit = None
        self._call(self._handler.on_lost, conversation.peer, reason)
        dialer = self._dialers.get(conversation.peer)
        if dialer is not None:
            dialer.begin_new_session(reason)

    # ---------------------------------------------------------------------------------------- listening side

    def _listener_frame(self, route: bytes, data: bytes) -> None:
        try:
            frame = unpack(data)
            if frame.kind is FrameKind.GREETING:
                self._greeted(route, frame)
                return
        except WireError as error:
            self.counters["greetings_refused"] += 1
            self._send_to(route, pack(FrameKind.REFUSAL, str(error).encode()))
            return
        conversation = self._routes.get(route)
        if conversation is None:
            self.counters["frames_without_session"] += 1
            self._send_to(route, pack(FrameKind.FAREWELL, b"the session is over here"))
        else:
            self._session_frame(conversation, frame)

    def _greeted(self, route: bytes, frame: Frame) -> None:
        greeting, peer = self._keys.check(frame.payload, from_listening=False)
        known = self._conversations.get(peer)
        if known is not None and known.session_id != greeting.session:
            self._lose(known, "peer began a new session")
            known = None
        if known is None and greeting.resuming:
            self._send_to(route, self._keys.greet(self.me, 0, False, 0, listening=True))
            return

        def transmit(data: bytes) -> bool:
            return self._send_to(route, data)

        if known is None:
            known = self._open(peer, greeting.session, transmit)
        else:
            self.counters["sessions_resumed"] += 1
            self._routes.pop(known.route, None)
        known.route = route
        self._routes[route] = known
        known.resume(transmit, greeting.received)
        answer = greeting.session, greeting.resuming, known.received()
        transmit(self._keys.greet(self.me, *answer, listening=True))
        known.transmit_unsent()

    def _send_to(self, route: bytes, data: bytes) -> bool:
        return self._listening is not None and self._listening.send(route, data)

    # ------------------------------------------------------------------------------------------ dialling side

    def greeting_of(self, dialer: Dialer) -> bytes:
        """See DialerOwner."""
        conversation = self._conversations.get(dialer.peer)
        received = conversation.received() if conversation is not None else 0
        resuming = conversation is not None
        return self._keys.greet(self.me, dialer.session_id, resuming, received, listening=False)

    def on_dialer_down(self, dialer: Dialer) -> None:
        """See DialerOwner."""
        conversation = self._conversations.get(dialer.peer)
        if conversation is not None:
            conversation.transmit = None

    def on_dialer_frame(self, dialer: Dialer, frame: Frame) -> None:
        """See DialerOwner."""
        conversation = self._conversations.get(dialer.peer)
        if conversation is not None:
            self._session_frame(conversation, frame)

    def on_dialer_answered(self, dialer: Dialer, greeting: Greeting) -> bool:
        """See DialerOwner."""
        conversation = self._conversations.get(dialer.peer)
        if greeting.session != dialer.session_id:
            if conversation is not None:
                self._lose(conversation, "peer had ended the session")
            return False
        if conversation is None:
            conversation = self._open(dialer.peer, dialer.session_id, dialer.send)
        else:
            self.counters["sessions_resumed"] += 1
        conversation.resume(dialer.send, greeting.received)
        conversation.transmit_unsent()
        return True

    # ------------------------------------------------------------------------------------------------- leases

    def _schedule_tick(self) -> None:
        if self._loop is not None and not self._closed:
            interval = min(self._settings.heartbeat_s / 2, self._settings.lease_s / 8)
            self._tick_handle = self._loop.call_later(interval, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        # A loop that stood still has not read what peers sent meanwhile: that time is not theirs.
        stalled = max(0.0, now - self._ticked_at - self._settings.heartbeat_s)
        self._ticked_at = now
        for conversation in list(self._conversations.values()):
            conversation.heard_at += stalled
            if now - conversation.heard_at > self._settings.lease_s:
                self.counters["leases_expired"] += 1
                conversation.farewell("your lease ended")
                self._lose(conversation, f"silent for {self._settings.lease_s:g} s")
            elif now - conversation.sent_at >= self._settings.heartbeat_s:
                conversation.heartbeat()
        for dialer in list(self._dialers.values()):
            dialer.check_answer(now - stalled)
        self._schedule_tick()
