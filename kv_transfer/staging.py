"""Slots through which KV moves in one piece, whatever pages it comes from and goes to.

Links are fast only with descriptors of megabytes, and pages are not. So a rank gathers the bytes for one rank
of the peer into a slot of its own, writes them into a slot of the peer with one descriptor, and the peer
spreads them over its pages. A receiver gives every writer slots of its own; where several ranks of a writer
send to one rank, each has its share of every slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.step_fences import Fence
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import MemoryRegion
from antiphon.protocol.layer_groups import layer_range
from antiphon.protocol.rank_messages import ShipOrder
from antiphon.protocol.staging_messages import StagedPages

ALIGNMENT = 4096
"""Shares of a slot begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some layers and heads of some pages of one group: what one copy moves. ``heads`` count this rank's."""

    group: str
    pages: tuple[int, ...]
    layers: range
    heads: range


class StagingMemory(Protocol):
    """One rank's slots, and the copies between them and its pages. Copies run beside the engine's steps."""

    @property
    def region(self) -> MemoryRegion:
        """All slots, to be registered: ``pages`` slots of ``page_bytes``."""

    def gather(self, offset: int, blocks: Sequence[Block]) -> Fence:
        """Copy pages into the staging memory from ``offset`` on, block after block; the fence says when."""

    def scatter(self, offset: int, blocks: Sequence[Block]) -> Fence:
        """The other way."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of a writer sends to one rank of a receiver.

    Attributes:
        mine, theirs: the heads that move, counted on the source and on the destination rank.
        index, of: which of how many source ranks that send to this destination rank.
    """

    mine: range
    theirs: range
    index: int
    of: int


def share_of(layout: GroupLayout, source: Shard, destination: Shard) -> Share | None:
    """The heads that one rank sends to another; None when it sends none."""
    senders = [
        layout.sender(head, source.tensor_parallel, destination.rank) for head in layout.heads(destination)
    ]
    ranks = sorted(set(senders))
    if source.rank not in ranks:
        return None
    heads = [
        head for head, sender in zip(layout.heads(destination), senders, strict=True) if sender == source.rank
    ]
    here, there = heads[0] - layout.heads(source).start, heads[0] - layout.heads(destination).start
    return Share(
        range(here, here + len(heads)),
        range(there, there + len(heads)),
        ranks.index(source.rank),
        len(ranks),
    )


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``first .. first + count - 1`` of each rank of a receiver, for one writer alone."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What fits into one share of a slot: some pages of one order for one rank of the peer.

    ``source`` and ``target`` are the same pages on either side.
    """

    source: tuple[StagedPages, ...]
    target: tuple[StagedPages, ...]
    size_bytes: int


def share_bytes(slot_bytes: int, share: Share) -> int:
    """Room of one source rank in a slot."""
    return slot_bytes // share.of // ALIGNMENT * ALIGNMENT


def share_offset(slot: int, slot_bytes: int, share: Share) -> int:
    """Where its room begins in the staging memory of the destination rank."""
    return slot * slot_bytes + share.index * share_bytes(slot_bytes, share)


def segments_of(
    order: ShipOrder,
    layouts: Mapping[str, GroupLayout],
    layer_groups: int,
    share: Share,
    room_bytes: int,
) -> list[Segment]:
    """An order cut into pieces of at most ``room_bytes``, as few as possible.

    Raises:
        TransferError: stage ``post``; one page does not fit.
    """
    segments: list[Segment] = []
    pieces: list[tuple[str, tuple[int, int]]] = []
    size = 0

    def close() -> None:
        nonlocal size
        if pieces:
            segments.append(Segment(_side(pieces, 0), _side(pieces, 1), size))
            pieces.clear()
            size = 0

    for group, pairs in (("full", order.full), ("sliding", order.sliding)):
        layout = layouts[group]
        layers = layer_range(layout.layers, order.layer_group, layer_groups)
        page = len(layers) * len(share.mine) * layout.head_bytes
        if pairs and page > room_bytes:
            raise TransferError(
                "post", f"a {group} page of {page} bytes is larger than {room_bytes} of a slot"
            )
        for pair in pairs if page else ():
            if size + page > room_bytes:
                close()
            pieces.append((group, pair))
            size += page
    close()
    return segments


def _side(pieces: Sequence[tuple[str, tuple[int, int]]], side: int) -> tuple[StagedPages, ...]:
    groups = dict.fromkeys(group for group, _ in pieces)
    return tuple(StagedPages(g, tuple(pair[side] for group, pair in pieces if group == g)) for g in groups)


def blocks_of(
    pages: Sequence[StagedPages],
    layouts: Mapping[str, GroupLayout],
    layer_group: int,
    layer_groups: int,
    heads: range,
) -> list[Block]:
    """The copies of one staged write on one side."""
    return [
        Block(
            each.group, each.pages, layer_range(layouts[each.group].layers, layer_group, layer_groups), heads
        )
        for each in pages
    ]
