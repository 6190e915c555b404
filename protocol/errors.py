"""Error classes that more than one package raises or catches."""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of every error this project raises on purpose. ``str(error)`` is one line for a user."""


class ConfigError(AntiphonError):
    """A configuration cannot be used; the message names the key and the value."""


class CheckpointError(AntiphonError):
    """A checkpoint cannot be loaded; the message names the file and the tensor."""


class HandshakeError(AntiphonError):
    """Two workers cannot exchange KV; the message carries both sides' values."""


TRANSFER_STAGES = ("handshake", "reserve", "post", "transfer", "connection", "notify")
"""Where a KV transfer can fail."""


class TransferError(AntiphonError):
    """A KV transfer failed; ``stage`` is one of ``TRANSFER_STAGES``.

    ``connection``: the transport gave the connection up, so it must be made anew; what was sent over it may
    arrive all the same, until the receiver has ended its side.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason


class WireError(AntiphonError):
    """A message could not be decoded, or comes from another protocol version."""


class IllegalTransition(AntiphonError):
    """A request or page was moved between two states that have no edge between them."""


class RankLostError(AntiphonError):
    """A rank of a worker died, hangs or left, so that the worker's other ranks cannot go on."""
