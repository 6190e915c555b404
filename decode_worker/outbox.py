"""The token stream to one router: one numbered batch per step, bounded by what the router has acknowledged.

Delivery in order and exactly once, across reconnects, is the link's. The outbox bounds how far a router that
still breathes but no longer reads may fall behind.
"""

from __future__ import annotations

from antiphon.protocol.errors import AntiphonError, WireError
from antiphon.protocol.messages import TokenBatch, TokenOutput


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
