"""Placement policy: which decode worker, which prefill worker. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class PlacementReason(StrEnum):
    """Why a worker was chosen; a metric label and a log field."""

    ONLY = "only"
    """There was no other."""
    PREFIX = "prefix"
    """It holds more of the prompt's beginning than the others."""
    LEAST_LOADED = "least_loaded"
    NO_ROOM = "no_room"
    """No worker has enough free pages now; the request waits in the queue of the least loaded one."""
    FIRST_CHOICE = "first_choice"
    """The first choice of the same prompt is there, whose pages this one shares."""


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode worker as placement sees it.

    ``free_pages`` and ``active`` already count what was sent to the worker since its last load report.
    """

    worker_id: str
    free_pages: int
    active: int
    """Requests running or waiting there."""
    cached_tokens: int
    """Leading tokens of this prompt that its prefix cache is believed to hold."""


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker as placement sees it; ``queued_tokens`` counts what was sent since its last report."""

    worker_id: str
    queued_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice and its reason."""

    worker_id: str
    reason: PlacementReason


def choose_decode(
    candidates: Sequence[DecodeCandidate], pages_needed: int, slack_requests: int = 2
) -> Placement | None:
    """The decode worker for a request that needs ``pages_needed`` pages; None without candidates.

    Among the workers with room, those within ``slack_requests`` of the least loaded compete by how much of
    the prompt they hold; so a cached prefix is worth a slightly longer batch, never a hot spot.
    """
    if not candidates:
        return None
    if len(candidates) == 1:
        return Placement(candidates[0].worker_id, PlacementReason.ONLY)
    with_room = [c for c in candidates if c.free_pages >= pages_needed]
    pool = with_room or candidates
    least = min(c.active for c in pool)
    near = [c for c in pool if c.active <= least + slack_requests]
    best = min(near, key=lambda c: (-c.cached_tokens, c.active, -c.free_pages, c.worker_id))
    if not with_room:
        return Placement(best.worker_id, PlacementReason.NO_ROOM)
    prefers_prefix = any(c.cached_tokens < best.cached_tokens for c in pool)
    return Placement(
        best.worker_id, PlacementReason.PREFIX if prefers_prefix else PlacementReason.LEAST_LOADED
    )


def choose_prefill(candidates: Sequence[PrefillCandidate], prompt_tokens: int) -> Placement | None:
    """The prefill worker that can be expected to finish first; None without candidates.

    The cost is tokens: those queued there plus those of this prompt that it would have to compute.
    """
    if not candidates:
        return None
    if len(candidates) == 1:
        return Placement(candidates[0].worker_id, PlacementReason.ONLY)

    def cost(candidate: PrefillCandidate) -> int:
        return candidate.queued_tokens + max(prompt_tokens - candidate.cached_tokens, 1)

    best = min(candidates, key=lambda c: (cost(c), c.queued_tokens, c.worker_id))
    # The reason is the prefix exactly when another worker would have won without it.
    prefix_decided = any(c.queued_tokens < best.queued_tokens for c in candidates) or any(
        c.cached_tokens < best.cached_tokens and c.queued_tokens == best.queued_tokens for c in candidates
    )
    return Placement(
        best.worker_id, PlacementReason.PREFIX if prefix_decided else PlacementReason.LEAST_LOADED
    )
