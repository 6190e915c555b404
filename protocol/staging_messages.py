"""Notifications of staged writes: bytes that arrive in one piece and are spread over pages where they arrive.

They travel with the transfer itself, between transfer agents, and concern nobody else.
"""

from __future__ import annotations

import msgspec

from antiphon.protocol.kv_messages import WriteKey
from antiphon.protocol.messages import Message


class StagedPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a staged write: pages of one group, in the order in which their bytes lie."""

    group: str
    """``full`` or ``sliding``."""
    pages: tuple[int, ...]
    """The receiver's pages."""


class StagedWrite(Message, frozen=True):
    """Writer -> rank ``part`` of the receiver: a slot holds these layers of these pages; spread them.

    ``key`` is landed once all ``parts`` ranks of the receiver have done so.
    """

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    key: WriteKey
    part: int
    parts: int
    source_ranks: int
    slot: int
    offset: int
    """Where the bytes begin, from the beginning of the receiver's staging memory."""
    pages: tuple[StagedPages, ...]


class SlotFree(Message, frozen=True):
    """Receiver -> writer: the bytes of this write lie in their pages, and its slot may be written again."""

    request_id: str
    attempt: int
    key: WriteKey
    part: int
    slot: int


StagingMessage = StagedWrite | SlotFree
"""Every message of this module."""
