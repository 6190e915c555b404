"""The generations between admission and their end, and the one place where one ends."""

from __future__ import annotations

import asyncio
import time

from antiphon.router.dispatch.accounts import Accounts
from antiphon.router.dispatch.fleet import Fleet
from antiphon.router.dispatch.generation import Generation
from antiphon.router.dispatch.legs import Legs
from antiphon.router.lifecycle import EndKind
from antiphon.router.metrics import RouterMetrics


class OpenGenerations:
    """Owns the registry, the deadlines and the ends."""

    def __init__(self, legs: Legs, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._legs = legs
        self._fleet = fleet
        self._accounts = Accounts(metrics)
        self._loop = asyncio.get_running_loop()
        self._by_id: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, generation: Generation) -> None:
        """Register a generation and set its deadline."""
        self._by_id[generation.request_id] = generation
        generation.deadline_timer = self._loop.call_later(
            max(generation.deadline_at - time.monotonic(), 0.0),
            self.abandon,
            generation,
            EndKind.DEADLINE,
            "the deadline has passed",
        )

    def get(self, request_id: str) -> Generation | None:
        """An open generation by its id."""
        return self._by_id.get(request_id)

    def all(self) -> list[Generation]:
        """Every open generation."""
        return list(self._by_id.values())

    def tokens_arrived(self, generation: Generation, count: int, now: float) -> None:
        """Account for new tokens; called before they are delivered."""
        self._accounts.tokens_arrived(generation, count, now)

    def abandon(self, generation: Generation, kind: EndKind, detail: str | None = None) -> None:
        """End a generation from this side and tell both legs to stop; does nothing after its end."""
        if generation.end is not None:
            return
        self._legs.abort(generation, kind)
        self.end(generation, kind, detail)

    def end(
        self,
        generation: Generation,
        kind: EndKind,
        detail: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """End a generation of which no worker has to be told.

        Raises:
            IllegalTransition: it has ended before.
        """
        self.cancel_wait(generation)
        if generation.deadline_timer is not None:
            generation.deadline_timer.cancel()
            generation.deadline_timer = None
        self._by_id.pop(generation.request_id, None)
        for worker_id in (generation.decode_worker_id, generation.prefill_worker_id):
            self._fleet.release(worker_id, generation.request_id)
        stage = generation.state
        generation.finish_with(kind, detail, retry_after_s)
        self._accounts.ended(generation, kind, stage, time.monotonic())

    def cancel_wait(self, generation: Generation) -> None:
        """Stop the timer of whatever the generation waited for."""
        if generation.wait_timer is not None:
            generation.wait_timer.cancel()
            generation.wait_timer = None
