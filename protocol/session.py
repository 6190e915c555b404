"""One side of a conversation that survives reconnects: in order, exactly once, bounded.

A session lives from the first greeting until one side's lease ends. While it lives, every queued payload
reaches the peer exactly once and in order, whatever happens to the connection underneath: payloads are
numbered from 1, kept until acknowledged, and sent again after a reconnect from where the peer says it is.
Pure state; no sockets, no clock.
"""

from __future__ import annotations

from collections import deque

from antiphon.protocol.errors import AntiphonError, WireError


class SessionOverflow(AntiphonError):
    """The peer has not acknowledged for so long that the bound on unacknowledged payloads is reached."""


class Session:
    """Numbering, acknowledgement and resending of one side's payloads."""

    def __init__(self, max_payloads: int, max_bytes: int) -> None:
        self._max_payloads = max_payloads
        self._max_bytes = max_bytes
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._unacknowledged_bytes = 0
        self._last_queued = 0
        self._last_sent = 0
        self._received = 0
        self._told = 0
        self._untold_bytes = 0

    @property
    def received(self) -> int:
        """Number of the last payload taken from the peer."""
        return self._received

    @property
    def untold(self) -> int:
        """Payloads taken that the peer has not been told about."""
        return self._received - self._told

    @property
    def untold_bytes(self) -> int:
        """Of those payloads."""
        return self._untold_bytes

    @property
    def unacknowledged(self) -> int:
        """Payloads queued or sent that the peer has not acknowledged."""
        return len(self._unacknowledged)

    @property
    def unacknowledged_bytes(self) -> int:
        """Of those payloads."""
        return self._unacknowledged_bytes

    def queue(self, payload: bytes) -> None:
        """Add a payload to be sent.

        Raises:
            SessionOverflow: the bound is reached; the session is of no use any more.
        """
        full = len(self._unacknowledged) >= self._max_payloads
        if full or self._unacknowledged_bytes + len(payload) > self._max_bytes:
            raise SessionOverflow(
                f"{len(self._unacknowledged)} messages ({self._unacknowledged_bytes} bytes) unacknowledged"
            )
        self._last_queued += 1
        self._unacknowledged.append((self._last_queued, payload))
        self._unacknowledged_bytes += len(payload)

    def take_unsent(self) -> list[tuple[int, bytes]]:
        """(number, payload) queued since the last call or to be repeated; now counts as sent."""
        count = self._last_queued - self._last_sent
        if count == 0:
            return []
        start = len(self._unacknowledged) - count
        self._last_sent = self._last_queued
        return [self._unacknowledged[i] for i in range(start, len(self._unacknowledged))]

    def tell(self) -> int:
        """The acknowledgement to put on the next frame."""
        self._told, self._untold_bytes = self._received, 0
        return self._received

    def acknowledge(self, up_to: int) -> None:
        """The peer has taken every payload up to this number.

        Raises:
            WireError: nothing with this number was ever queued.
        """
        if up_to > self._last_queued:
            raise WireError(f"acknowledgement of message {up_to}, only {self._last_queued} were sent")
        while self._unacknowledged and self._unacknowledged[0][0] <= up_to:
            self._unacknowledged_bytes -= len(self._unacknowledged.popleft()[1])
        self._last_sent = max(self._last_sent, up_to)

    def accept(self, number: int, size: int = 0) -> bool:
        """Whether the payload of this number, of so many bytes, is new; a repeat is not.

        Raises:
            WireError: a number was skipped, which no working peer does.
        """
        if number > self._received + 1:
            raise WireError(f"message {number} follows message {self._received}")
        if number <= self._received:
            return False
        self._received = number
        self._untold_bytes += size
        return True

    def resume(self, peer_received: int) -> None:
        """The connection was replaced and the peer has taken up to ``peer_received``: resend the rest.

        Raises:
            WireError: the peer claims a message that was never sent.
        """
        self.acknowledge(peer_received)
        self._last_sent = peer_received
