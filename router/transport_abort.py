"""Close a client's connection at once, without waiting for it to read what is buffered."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_STATE_KEY = "antiphon.transport"


class AbortableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that leaves the connection's transport in the request's state.

    ASGI has no word for "drop this client": returning early makes uvicorn flush first, which a client that
    does not read turns into for ever.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.app_state: dict[str, Any] = {**self.app_state, _STATE_KEY: transport}
        super().connection_made(transport)


async def abort_connection(scope: Scope) -> None:
    """Drop the client of this request; under another server the connection is closed as that server does.

    Without lingering, so that the kernel forgets what the client has not read as well.
    """
    transport = scope.get("state", {}).get(_STATE_KEY)
    if transport is None or transport.is_closing():
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
    # The server learns of it on the loop's next turn, and then does not miss the rest of the response.
    await asyncio.sleep(0)
