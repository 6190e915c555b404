"""What the router asks of its HTTP server beyond ASGI.

Drop a client at once, write without a task's turn, and wait for no client for ever.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import httptools
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from antiphon.router.openai.ends import SHUTDOWN_RETRY_AFTER_S
from antiphon.router.openai.errors import ApiError, head_too_large, head_too_slow, invalid, unavailable

log = structlog.get_logger("antiphon.router.http")

MAX_HEAD_BYTES = 64 * 1024
"""Of a URL and headers together, of trailers, and of whatever else frames a body without being part of it."""
MAX_WAITING_REQUESTS = 8
"""Behind the one that is answered, on the same connection: while there are more, no more are read."""
LINGER_S = 2.0
"""A refused client gets so long to stop sending and read why."""
_STATE_KEY = "antiphon.connection"
_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
"""Headers that offer another protocol, and what ``Connection`` says of them."""


class _Part(Enum):
    """What of a request comes next."""

    HEAD_BEGIN = auto()
    HEAD_REST = auto()
    BODY = auto()
    IGNORED = auto()
    """The client has been refused, and may not have read that yet."""


class _HeadTooLarge(Exception):
    """Stops the parser at a head that is over the limit."""


class AbortableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that leaves itself in the request's state, and bounds what clients may hold.

    ASGI has no word for "drop this client": returning early makes uvicorn flush first, which a client that
    does not read turns into for ever.

    uvicorn waits for ever for a head, or for the rest of a body that nobody reads. Here one timer runs while
    either comes; the bodies of requests are bounded by who reads them (``request_body.py``), streams by the
    bound on slow readers. What is left of a whole answer must be read on, which the kernel watches.

    A client that offers to go on in another protocol (Java's, in HTTP/2) is answered in this one.

    Where requests are sent ahead, uvicorn stops reading, so that it does not see the client leave, and tells
    the last of them of that instead of the one that is answered. Here a few are read on, and it is told.
    """

    head_timeout_s: float
    """From the first byte of a head, or the connection's start, to its end."""
    body_timeout_s: float
    """How long the rest of a body may still come once its request has been answered, and how long nothing of
    the answer may be read."""

    _part = _Part.HEAD_BEGIN
    _timer: asyncio.TimerHandle | None = None
    _reading_is_bounded = False
    _body_came = False
    """Whether the data that is being parsed has some of a body."""
    _head_bytes = 0
    """Of a head that comes, or since the last byte of a body."""
    _plain_head: bytes | None = None
    """The head that the parser stopped behind, without its offer of another protocol."""
    _rest_at = 0
    """Where the data goes on behind that head."""
    _begun: RequestResponseCycle | None = None
    """The last request whose answer has begun; others may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.app_state: dict[str, Any] = {**self.app_state, _STATE_KEY: self}
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        if self._begun is not None and not self._begun.response_complete:
            self._begun.disconnected = True
            self._begun.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request came; line ends before one count as its beginning."""
        if self._part is _Part.IGNORED:
            return
        if self._part is _Part.HEAD_BEGIN and self._timer is None:
            self._await_head()
        before, self._body_came = self._part, False
        super().data_received(data)
        while self._plain_head is not None:
            # Behind an upgrade, and even more behind one and "close", the parser reads no further request.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own has them
            data, self._plain_head = self._plain_head + data[self._rest_at :], None
            super().data_received(data)
        if before is self._part and (
            before is _Part.HEAD_REST or (before is _Part.BODY and not self._body_came)
        ):
            # The parser keeps a value, of trailers too, to itself until it ends.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._part, self._head_bytes = _Part.HEAD_REST, 0
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain_head = self._head_without_offer()
            return
        super().on_headers_complete()  # which refuses a target that is no URL
        if 0 < len(self.pipeline) <= MAX_WAITING_REQUESTS:
            self.flow.resume_reading()
        self._part, self._head_bytes = _Part.BODY, 0
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        """More of a body."""
        self._body_came, self._head_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A whole request is there."""
        if self._plain_head is not None:
            return  # its body is still to come, which the parser took for something else
        self._part = _Part.HEAD_BEGIN
        self._stop_timer()
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_head()  # its answer was the last time that uvicorn set a time for the next request

    def on_response_complete(self) -> None:
        """A request has been answered."""
        self.bound_reading(True)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._part is _Part.BODY and self.cycle.response_complete:
            self._stop_timer()
            self._timer = self.loop.call_later(self.body_timeout_s, self.transport.close)
        elif self._timer is not None:
            self._await_head()  # nothing was read of it while the answer was made

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it: say so in the API's own form, and close."""
        too_large = self._head_bytes > MAX_HEAD_BYTES
        self._refuse(head_too_large(MAX_HEAD_BYTES) if too_large else invalid(msg, None, "invalid_http"))

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [one.strip() for one in value.split(b",")]
                value = b", ".join(one for one in kept if one.lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))

    def _unsupported_upgrade_warning(self) -> None:
        """The parser stopped behind a head with such an offer, and says where."""
        stopped = sys.exception()
        if isinstance(stopped, httptools.HttpParserUpgrade):
            self._rest_at = stopped.args[0]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._begun = cycle
        unchunked: ASGI3Application = _Unchunked(app, cycle)  # type: ignore[arg-type, assignment]
        super()._start_asgi_task(cycle, unchunked if cycle.scope["http_version"] == "1.0" else app)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _body_is_awaited(self) -> bool:
        """Whether the rest of its body is all that the present request waits for."""
        # What has been parsed is not yet what is answered, where requests are pipelined.
        return self._part is _Part.BODY and not self.cycle.response_started and not self.pipeline

    def shutdown(self) -> None:
        """The server ends, and waits for answers only: not for a body that may never be whole."""
        if self._body_is_awaited:
            self._refuse(unavailable("The server is shutting down.", SHUTDOWN_RETRY_AFTER_S))
        else:
            super().shutdown()

    def bound_reading(self, bounded: bool) -> None:
        """Have the kernel give the connection up once its client has read nothing for ``body_timeout_s``.

        Closing waits for what is still to be read of an answer, so that without this it and the connection
        would stay for ever. The kernel alone sees how much that is: above TLS nobody does.
        """
        if bounded is self._reading_is_bounded:
            return
        self._reading_is_bounded = bounded
        limit_ms = max(1, round(self.body_timeout_s * 1e3)) if bounded else 0
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._answering:
            self._await_head()  # of the next request: the answer to this one goes on
        elif self._part is _Part.HEAD_REST:
            self._refuse(head_too_slow(self.head_timeout_s))
        else:
            self.transport.close()  # asked nothing: there is nothing to answer

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close; while another answer is made or written, only close."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        its_own_body = self._body_is_awaited
        self._part = _Part.IGNORED
        if self._answering and not its_own_body:
            self.transport.close()
            return
        body = error.body()
        phrase = HTTPStatus(error.status).phrase.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        headers["connection"] = "close"
        head = b"HTTP/1.1 %d %b\r\n" % (error.status, phrase)
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode() + b"\r\n"
        self.transport.write(head + body)
        log.info("connection_refused", status=error.status, error=error.metric_type)
        if self.transport.can_write_eof() and not its_own_body:
            # Closing upon what has not been read resets the connection, and the client loses the answer.
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def protocol_class(head_timeout_s: float, body_timeout_s: float) -> type[AbortableProtocol]:
    """The protocol with these limits, for a server that makes one for each connection."""
    return type(
        AbortableProtocol.__name__,
        (AbortableProtocol,),
        {"head_timeout_s": head_timeout_s, "body_timeout_s": body_timeout_s},
    )


class _Unchunked:
    """An application for a client of HTTP/1.0, which knows no chunks.

    A body that has no length ends with the connection.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                self._cycle.chunked_encoding = False
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)


class StreamedBody:
    """Writes parts of one response's body from wherever they are made, as ``send`` would.

    A task per stream costs a turn of the loop per token, and makes the first token of a batch wait for the
    last one; this does not.
    """

    def __init__(self, protocol: AbortableProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether a part can be written now: the head has been sent, and the client keeps up."""
        cycle = self._cycle
        return bool(
            cycle.response_started
            and cycle.chunked_encoding
            and not cycle.response_complete
            and not cycle.disconnected
            and not self._protocol.flow.write_paused
        )

    def write(self, body: bytes) -> None:
        """Write a part, which is not empty, while ``ready``."""
        self._protocol.bound_reading(False)  # of the answer before; this one waits for as long as it may
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def streamed_body(scope: Scope) -> StreamedBody | None:
    """The body of this request's response; None under another server, or behind a pipelined request."""
    protocol = scope.get("state", {}).get(_STATE_KEY)
    if protocol is None or protocol.cycle is None or protocol.cycle.scope is not scope:
        return None
    return StreamedBody(protocol, protocol.cycle)


async def abort_connection(scope: Scope) -> None:
    """Drop the client of this request; under another server the connection is closed as that server does.

    Without lingering, so that the kernel forgets what the client has not read as well.
    """
    protocol = scope.get("state", {}).get(_STATE_KEY)
    if protocol is None or protocol.transport.is_closing():
        return
    connection = protocol.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    protocol.transport.abort()
    # The server learns of it on the loop's next turn, and then does not miss the rest of the response.
    await asyncio.sleep(0)
