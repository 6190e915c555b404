"""Wire codec: msgpack with a tag per message, strict about unknown fields and types."""

from __future__ import annotations

import msgspec

from antiphon.protocol.errors import WireError
from antiphon.protocol.kv_messages import KvMessage
from antiphon.protocol.messages import Message, RequestMessage
from antiphon.protocol.rank_messages import RankMessage
from antiphon.protocol.staging_messages import StagingMessage

AnyMessage = RequestMessage | KvMessage
"""Every message that may stand alone on a link."""

WireMessage = AnyMessage | RankMessage | StagingMessage
"""Everything that may stand alone on a wire of any kind."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)


def encode(message: Message) -> bytes:
    """Serialise one message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> WireMessage:
    """Parse one message.

    Raises:
        WireError: the bytes are not a known message of this protocol version.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WireError(f"undecodable message of {len(data)} bytes: {error}") from error
