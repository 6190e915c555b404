"""What the router asks of its HTTP server beyond ASGI: drop a client at once, write without a task's turn."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from antiphon.router.openai.errors import invalid

_STATE_KEY = "antiphon.connection"


class AbortableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that leaves itself in the request's state.

    ASGI has no word for "drop this client": returning early makes uvicorn flush first, which a client that
    does not read turns into for ever.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.app_state: dict[str, Any] = {**self.app_state, _STATE_KEY: self}
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP: say so in the API's own form, and close."""
        body = invalid(msg, None, "invalid_http").body()
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % len(body) + body)
        self.transport.close()


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
