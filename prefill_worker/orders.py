"""What is to be written where, from what the engine says it computed and what decode has reserved."""

from __future__ import annotations

import torch

from antiphon.engine.events import KvWritten
from antiphon.engine.prefix_cache import window_first_page
from antiphon.kv_transfer.handshake import page_pairs
from antiphon.kv_transfer.step_fences import DeviceFence, Fence
from antiphon.protocol.kv_messages import WriteKey
from antiphon.protocol.messages import KvTicket
from antiphon.protocol.rank_messages import ShipOrder, StepMark


def announced_writes(chunks: int, layer_groups: int, ranks: int) -> frozenset[WriteKey]:
    """Every write of a request of so many chunks: one of each rank, chunk and layer group."""
    return frozenset(
        WriteKey(rank, chunk, group)
        for rank in range(ranks)
        for chunk in range(chunks)
        for group in range(layer_groups)
    )


def ticket_problem(ticket: KvTicket, page_size: int, window: int) -> str:
    """Which pages of the wanted positions a ticket does not name, or nothing: those would never be written.

    Args:
        window: tokens that a sliding layer sees.
    """
    skipped, end = ticket.skip_tokens // page_size, -(-ticket.kv_tokens // page_size)
    if ticket.skip_tokens % page_size or not 0 <= ticket.skip_tokens < ticket.kv_tokens:
        return f"{ticket.skip_tokens} of {ticket.kv_tokens} positions to skip, with pages of {page_size}"
    seen = max(skipped, window_first_page(ticket.kv_tokens, window, page_size))
    for group, wanted, first, pages in (
        ("full", skipped, skipped, ticket.full_pages),
        ("sliding", seen, ticket.sliding_first_page, ticket.sliding_pages),
    ):
        if not first <= wanted < end <= first + len(pages):
            return f"{len(pages)} {group} pages from page {first} on, where {wanted} .. {end - 1} are wanted"
    return ""


def ship_order(ticket: KvTicket, event: KvWritten, mark: StepMark, page_size: int) -> ShipOrder:
    """The pages of one layer group of one chunk, as far as decode wants them."""
    first_full = ticket.skip_tokens // page_size
    return ShipOrder(
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        decode_epoch=ticket.decode_epoch,
        chunk=event.chunk,
        layer_group=event.layer_group,
        full=tuple(page_pairs(event.full_pages, ticket.full_pages, first_full)),
        sliding=tuple(page_pairs(event.sliding_pages, ticket.sliding_pages, ticket.sliding_first_page)),
        ready_after=mark,
    )


def source_fence(device: torch.device) -> Fence | None:
    """Whether everything issued so far on the current stream of the calling thread is done; None on CPUs."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return DeviceFence(event.query, event.cuda_event, event)
