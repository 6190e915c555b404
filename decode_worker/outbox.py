"""The token streams to routers: one numbered batch per step, bounded by what the router has acknowledged.

Delivery in order and exactly once, across reconnects, is the link's. The outbox bounds how far a router that
still breathes but no longer reads may fall behind.
"""

from __future__ import annotations

from collections import Counter

from antiphon.protocol.errors import AntiphonError, WireError
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.messages import TokenBatch, TokenOutput, TokensAck

MAX_UNACKNOWLEDGED_BATCHES = 4096


class OutboxFull(AntiphonError):
    """The router has not acknowledged as many batches as the outbox holds; it is treated as lost."""


class Outbox:
    """Numbers batches from 1 and counts those that the router has not taken."""

    def __init__(self, epoch: int, max_unacknowledged: int) -> None:
        self._epoch = epoch
        self._max_unacknowledged = max_unacknowledged
        self._sent = 0
        self._acknowledged = 0

    @property
    def unacknowledged(self) -> int:
        """Batches sent and not taken."""
        return self._sent - self._acknowledged

    def batch(self, outputs: list[TokenOutput]) -> TokenBatch:
        """The next batch.

        Raises:
            OutboxFull: the bound is reached.
        """
        if self.unacknowledged >= self._max_unacknowledged:
            raise OutboxFull(f"{self.unacknowledged} token batches are unacknowledged")
        self._sent += 1
        return TokenBatch(self._epoch, self._sent, outputs)

    def acknowledge(self, sequence_number: int) -> None:
        """The router has taken every batch up to this one; an older acknowledgement changes nothing.

        Raises:
            WireError: no such batch was ever sent.
        """
        if sequence_number > self._sent:
            raise WireError(f"acknowledgement of batch {sequence_number}, only {self._sent} were sent")
        self._acknowledged = max(self._acknowledged, sequence_number)


class Outboxes:
    """One for each router that a link stands with; who falls behind is cut off. On the link thread."""

    def __init__(self, node: LinkNode, counters: Counter[str]) -> None:
        self._node = node
        self._counters = counters
        self._of: dict[Peer, Outbox] = {}

    def open(self, router: Peer) -> None:
        """A router's link stands: its stream begins anew."""
        self._of[router] = Outbox(self._node.me.epoch, MAX_UNACKNOWLEDGED_BATCHES)

    def close(self, router: Peer) -> None:
        """Its link ended."""
        self._of.pop(router, None)

    def acknowledged(self, router: Peer, message: TokensAck) -> None:
        """It has taken batches; one that acknowledges what it was never sent is cut off."""
        outbox = self._of.get(router)
        try:
            if outbox is not None:
                outbox.acknowledge(message.sequence_number)
        except WireError as error:
            self._node.disconnect(router, str(error))

    def send(self, router: Peer, outputs: list[TokenOutput]) -> None:
        """A step's tokens."""
        outbox = self._of.get(router)
        if outbox is None:
            return  # its lease ended while the step ran; its requests are being aborted
        try:
            self._node.send(router, outbox.batch(outputs))
        except OutboxFull as error:
            self._counters["outboxes_full"] += 1
            del self._of[router]
            self._node.disconnect(router, str(error))
