"""What a process brings to its links."""

from __future__ import annotations

from typing import Protocol

from antiphon.protocol.codec import AnyMessage
from antiphon.protocol.link_wire import Peer


class LinkHandler(Protocol):
    """What a process does with its links. All calls come from the loop's thread."""

    def on_up(self, peer: Peer) -> None:
        """A session with this peer began."""

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        """The peer sent a message."""

    def on_lost(self, peer: Peer, reason: str) -> None:
        """The session ended; nothing of it will arrive any more."""
