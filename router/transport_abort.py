"""Close a client's connection at once, without waiting for it to read what is buffered."""

from __future__ import annotations

import asyncio
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


def abort_connection(scope: Scope) -> None:
    """Drop the client of this request; under another server the connection is closed as that server does."""
    transport = scope.get("state", {}).get(_STATE_KEY)
    if transport is not None:
        transport.abort()
