"""Reasoning as an opaque text that a client hands back: ``encrypted_content`` of the Responses API.

The chain of thought is in the answer in the clear, so there is nothing to hide; the capsule only lets clients
that keep nothing but ``encrypted_content`` give the model its reasoning back.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "antiphon1:"
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""A capsule comes from a client and may unpack to anything; beyond this it is not read."""


def seal(text: str) -> str:
    """The capsule of a text."""
    return _PREFIX + base64.b64encode(zlib.compress(text.encode())).decode()


def unseal(capsule: str) -> str | None:
    """The text of a capsule; None for one that this server did not make."""
    if not capsule.startswith(_PREFIX):
        return None
    try:
        packed = base64.b64decode(capsule[len(_PREFIX) :], validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, MAX_TEXT_BYTES)
        return text.decode() if unpacker.eof else None
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return None
