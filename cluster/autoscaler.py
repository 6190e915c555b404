"""How many workers a pool should have: a pure rule on what they say, and the loop that follows it.

Prefill is short of workers when its backlog takes too long: the prompt tokens that wait, divided by what the
pool has been seen to compute in a second. Decode is short when its pages fill up or requests wait for some. A
pool grows at once, at most to twice its size, and shrinks by one worker after it was too large for a while.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from antiphon.cluster.member import Member, MemberState
from antiphon.cluster.process import ProcessStatus
from antiphon.cluster.supervisor import OperationFailed, Supervisor
from antiphon.configs.operation import AutoscaleConfig
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role

log = structlog.get_logger("antiphon.autoscaler")

SHORTEST_RATE_WINDOW_S = 0.5
"""Two statuses closer together than this say nothing about a rate."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool at one time."""

    workers: int
    waiting_tokens: int = 0
    """Prompt tokens that wait to be computed, in all workers."""
    tokens_per_s: float | None = None
    """The most that one worker has been seen to compute in a second; None while nothing is known."""
    page_use: float = 0.0
    """Share of the pool's pages that are held."""
    waiting_requests: int = 0
    """Requests that hold no pages."""


def prefill_workers_needed(load: PoolLoad, backlog_s: float) -> int:
    """Workers with which the backlog would be gone in ``backlog_s``; at least 1."""
    if load.tokens_per_s is None or not load.tokens_per_s:
        return load.workers
    return max(1, math.ceil(load.waiting_tokens / (load.tokens_per_s * backlog_s)))


def decode_workers_needed(load: PoolLoad, page_use: float) -> int:
    """Workers with which ``page_use`` of the pages would be held; one more while somebody waits for pages."""
    needed = max(1, math.ceil(load.workers * load.page_use / page_use))
    return max(needed, load.workers + 1) if load.waiting_requests else needed


@dataclass(slots=True)
class PoolScaler:
    """Decides about one pool, over time."""

    least: int
    most: int
    shrink_after_s: float
    too_large_since: float | None = field(default=None)

    def decide(self, workers: int, needed: int, now: float) -> int:
        """How many workers there should be from now on."""
        needed = min(max(needed, self.least), self.most)
        if needed >= workers:
            self.too_large_since = None
            return max(workers, min(needed, 2 * workers))
        if self.too_large_since is None:
            self.too_large_since = now
        if now - self.too_large_since < self.shrink_after_s:
            return workers
        self.too_large_since = now
        return workers - 1


class RateMeter:
    """The highest rate of computed prompt tokens that any life of any worker has shown."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def note(self, member: Member, status: ProcessStatus, now: float) -> None:
        """Take a worker's total; only its changes count."""
        if member.address is None:
            return
        key = member.spec.worker_id, member.address.epoch
        then, tokens = self._seen.get(key, (now, status.computed_prompt_tokens))
        if now - then >= SHORTEST_RATE_WINDOW_S and status.computed_prompt_tokens > tokens:
            rate = (status.computed_prompt_tokens - tokens) / (now - then)
            self.tokens_per_s = max(self.tokens_per_s or 0.0, rate)
        if key not in self._seen or now - then >= SHORTEST_RATE_WINDOW_S:
            self._seen = {k: v for k, v in self._seen.items() if k[0] != key[0]}
            self._seen[key] = now, status.computed_prompt_tokens


class Autoscaler:
    """Follows the load of the pools that may change their size."""

    def __init__(self, supervisor: Supervisor, config: DeploymentConfig) -> None:
        self._supervisor = supervisor
        self._settings: AutoscaleConfig = config.autoscale
        self._drain_timeout_s = config.router.drain_timeout_s
        self._rates = RateMeter()
        self._scalers = {
            role: PoolScaler(worker.replicas, worker.max_replicas, config.autoscale.shrink_after_s)
            for role, worker in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
            if worker.max_replicas is not None
        }

    async def run(self) -> None:
        """For ever; returns at once when no pool may change."""
        while self._scalers:
            await asyncio.sleep(self._settings.interval_s)
            for role, scaler in self._scalers.items():
                await self._follow(role, scaler)

    async def _follow(self, role: Role, scaler: PoolScaler) -> None:
        now = time.monotonic()
        members = self._supervisor.of_role(role)
        seen = [(m, m.status) for m in members if m.state is MemberState.RUNNING and m.status is not None]
        for member, status in seen:
            self._rates.note(member, status, now)
        if len(seen) < len(members):
            return  # somebody starts, drains or is lost: their share of the load will move
        load = pool_load([status for _, status in seen], self._rates.tokens_per_s)
        if role is Role.PREFILL:
            needed = prefill_workers_needed(load, self._settings.prefill_backlog_s)
        else:
            needed = decode_workers_needed(load, self._settings.decode_page_use)
        wanted = scaler.decide(len(members), needed, now)
        if wanted == len(members):
            return
        log.info("autoscaling", role=role, now=len(members), wanted=wanted, needed=needed)
        try:
            await self._supervisor.scale(role, wanted, self._drain_timeout_s)
        except OperationFailed as error:  # no room, for instance; the next turn tries again
            log.warning("autoscaling failed", role=role, wanted=wanted, reason=str(error))


def pool_load(statuses: Sequence[ProcessStatus], tokens_per_s: float | None) -> PoolLoad:
    """What the workers of one pool say, together."""
    return PoolLoad(
        workers=len(statuses),
        waiting_tokens=sum(status.queued_prefill_tokens for status in statuses),
        tokens_per_s=tokens_per_s,
        page_use=sum(status.page_use for status in statuses) / max(len(statuses), 1),
        waiting_requests=sum(status.waiting for status in statuses),
    )
