"""One streamed HTTP/1.1 answer, each server-sent event stamped when its bytes were read from the socket.

A load generator has to keep up with thousands of events per second in one process, and its own delays must
not enter the figures. So the events are cut in the transport's callback, and nothing else runs between the
read and the clock.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast
from urllib.parse import urlsplit

import httptools

from antiphon.benchmarks.serve.arrivals import WorkloadError

MAX_ERROR_BYTES = 4096
CONNECT_S = 5.0
MAX_EVENT_BYTES = 8 * 1024 * 1024


class StreamFailed(Exception):
    """The request got no whole answer; ``str`` is a short reason that can be counted."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    path: str
    tls: bool
    headers: tuple[tuple[str, str], ...] = ()
    address: str | None = None
    """What ``host`` was resolved to, so that no request waits for a name server."""

    @classmethod
    def parse(cls, base_url: str, path: str, api_key: str | None) -> Endpoint:
        """``base_url`` with or without a trailing ``/v1``; ``path`` such as ``/v1/completions``.

        Raises:
            WorkloadError: the URL is not http or https, or has no host.
        """
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError as error:
            raise WorkloadError(f"url {base_url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WorkloadError(f"url {base_url!r}: expected such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        return cls(parts.hostname, port or (443 if tls else 80), prefix + path, tls, headers)

    def request(self, body: bytes) -> bytes:
        """The bytes of a POST on a connection of its own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(slots=True)
class Head:
    """Status and headers (names in lower case) of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


OnEvent = Callable[[float, bytes], None]
"""Called with (monotonic seconds of the read, data of one event)."""


class _Answer(asyncio.Protocol):
    """Parses one answer as it arrives."""

    def __init__(self, request: bytes, on_event: OnEvent) -> None:
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self._now = 0.0
        self._transport: asyncio.Transport | None = None
        self.head = Head()
        self.error_body = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what create_connection promises
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(str(error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        framed = {"content-length", "transfer-encoding"} & self.head.headers.keys()
        if exc is None and self.head.status and not framed:
            self.on_message_complete()  # a body without a length ends where the connection does
            return
        self._fail(f"connection lost: {type(exc).__name__}" if exc else "connection closed before the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self.head.headers.get(key)
        self.head.headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        self.head.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.head.status != 200:
            self.error_body = (self.error_body + body)[:MAX_ERROR_BYTES]
            return
        # Servers end lines with \n or \r\n; a bare \r is legal and used by none.
        *lines, self._pending = (self._pending + body).split(b"\n")
        if len(self._pending) > MAX_EVENT_BYTES:
            raise StreamFailed("an event without end")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(self._now, line[5:].strip())

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        """Drop the connection, whatever state the answer is in."""
        if not self.done.done():
            self.done.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(StreamFailed(reason))


async def resolve(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the first address of its host that takes a connection.

    Raises:
        StreamFailed: none does.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StreamFailed(f"{endpoint.host}: {error.strerror or error}") from error
    for address in dict.fromkeys(str(each[4][0]) for each in found):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, endpoint.port), CONNECT_S)
        except (OSError, TimeoutError):
            continue  # such as ::1 where the server listens on 127.0.0.1 only
        writer.close()
        return replace(endpoint, address=address)
    raise StreamFailed(f"{endpoint.host}:{endpoint.port}: no connection")


async def post_stream(
    endpoint: Endpoint, body: bytes, on_event: OnEvent, timeout_s: float, tls: ssl.SSLContext | None = None
) -> tuple[Head, bytes]:
    """POST and hand over each event; returns (head, first bytes of the body of an error answer).

    Raises:
        StreamFailed: no connection, a broken answer, or longer than ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    answer = _Answer(endpoint.request(body), on_event)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(
                lambda: answer,
                endpoint.address or endpoint.host,
                endpoint.port,
                ssl=tls,
                server_hostname=endpoint.host if tls else None,
            )
            await answer.done
    except TimeoutError as error:
        raise StreamFailed(f"timeout after {timeout_s:g} s") from error
    except OSError as error:
        raise StreamFailed(f"connect: {error.strerror or type(error).__name__}") from error
    finally:
        answer.close()
    return answer.head, answer.error_body
