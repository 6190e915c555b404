"""One prefill request's life in a prefill worker.

    state       entered when                            leaves to
    QUEUED      the engine took the request             ANNOUNCED, ENDING
    ANNOUNCED   the engine started; permission asked    GRANTED, ENDING
    GRANTED     the decode worker allowed writing       SHIPPED, ENDING
    SHIPPED     every write is done and notified        (gone)
    ENDING      cancelled or failed                     (gone)

A job is gone once the engine has ended it and no write of it is under way. Only ANNOUNCED and later states
may have something to say to the decode worker; only GRANTED may post writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from antiphon.engine.events import KvWritten
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.kv_messages import WriteKey
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import PrefillRequest
from antiphon.protocol.rank_messages import StepMark


class JobState(StrEnum):
    """See the table above."""

    QUEUED = "queued"
    ANNOUNCED = "announced"
    GRANTED = "granted"
    SHIPPED = "shipped"
    ENDING = "ending"


_MOVES = {
    JobState.QUEUED: {JobState.ANNOUNCED, JobState.ENDING},
    JobState.ANNOUNCED: {JobState.GRANTED, JobState.ENDING},
    JobState.GRANTED: {JobState.SHIPPED, JobState.ENDING},
    JobState.SHIPPED: set(),
    JobState.ENDING: set(),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job will not complete; ``stage`` as in PrefillFailed."""

    stage: str
    reason: str


@dataclass(slots=True)
class PrefillJob:
    """Everything a prefill worker knows about one (request, attempt)."""

    request: PrefillRequest
    router: Peer
    decode: Peer
    announcement: int
    """Its number among all jobs of this worker: what answers another one's announcement is not for it."""
    state: JobState = JobState.QUEUED
    keys: frozenset[WriteKey] = frozenset()
    """The announced writes."""
    waiting: list[tuple[KvWritten, StepMark]] = field(default_factory=list)
    """Issued before the permission came, each with the point of the steps after which its source is ready."""
    posted_at: dict[WriteKey, float] = field(default_factory=dict)
    """Writes under way on any rank, with the time at which they were ordered."""
    repeated_at: float = 0.0
    """When the decode worker was last told again of those that take long."""
    done: dict[WriteKey, bytes] = field(default_factory=dict)
    """Writes that arrived, with the notification that was sent of each."""
    computed: bool = False
    failure: Failure | None = None
    drain_asked: bool = False
    """The decode worker waits for WritesDrained."""
    told: bool = False
    """The end was said to whoever waits for it."""
    engine_ended: bool = False
    quarantined: bool = False
    cached_tokens: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    computed_at: float = 0.0
    received_at: float = field(default_factory=time.monotonic)
    announced_at: float = 0.0
    bytes_sent: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Identity of this unit of work."""
        return self.request.request_id, self.request.attempt

    @property
    def decode_life(self) -> PeerLife:
        """Whose pages are written."""
        return PeerLife(self.decode.worker_id, self.decode.epoch)

    @property
    def engine_id(self) -> str:
        """Its name in the engine: works on a request, or an attempt, may overlap while an old one drains."""
        return f"{self.request.request_id}#{self.request.attempt}#{self.announcement}"

    @property
    def in_flight(self) -> int:
        """Writes that may still read the source pages and touch the destination."""
        return len(self.posted_at)

    def still_coming(self, keys: Iterable[WriteKey], patience_s: float) -> bool:
        """Whether one of these writes is not computed yet, or was posted less than ``patience_s`` ago."""
        if self.state not in (JobState.ANNOUNCED, JobState.GRANTED):
            return False
        now = time.monotonic()
        outstanding = [key for key in keys if key not in self.done]
        return any(now - self.posted_at.get(key, now) < patience_s for key in outstanding)

    def long_under_way(self, patience_s: float, now: float) -> frozenset[WriteKey]:
        """Writes that were ordered longer ago than that; none if it was told of them again since."""
        before = now - patience_s
        late = (key for key, at in self.posted_at.items() if at < before)
        return frozenset(late) if self.repeated_at < before else frozenset()

    @property
    def announced(self) -> bool:
        """Whether the decode worker has heard of it."""
        return bool(self.keys)

    @property
    def all_written(self) -> bool:
        """Every announced write is done and notified."""
        return self.announced and len(self.done) == len(self.keys)

    def move(self, state: JobState) -> None:
        """Change state.

        Raises:
            IllegalTransition: there is no such edge.
        """
        if state not in _MOVES[self.state]:
            raise IllegalTransition(f"prefill job {self.key}: {self.state} -> {state}")
        self.state = state

    def transfer_tail_s(self) -> float:
        """Time since the last chunk was computed."""
        return max(0.0, time.monotonic() - self.computed_at)
