"""Which faults a run injects and how many, and which state of a request the next one is aimed at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from antiphon.protocol.identity import Role

KILL, LONG_STOP, SHORT_STOP, CUT, LONG_CUT = "kill", "long stop", "short stop", "cut", "long cut"
STALE_WRITER = "stale writer"
"""A shorter stop of a prefill worker at the moment at which a write is due, while clients hang up: when it
goes on, its first act is a write into pages that the decode worker has given up on meanwhile."""
CONTROL_CUT = "control cut"
"""A worker loses its connections to Ray, and with them the supervisor; its links to its peers stand."""

SHARES = {
    STALE_WRITER: 12,
    KILL: 21,
    LONG_STOP: 11,
    CUT: 7,
    LONG_CUT: 4,
    SHORT_STOP: 4,
    CONTROL_CUT: 2,
}
"""Faults of each kind in a run of full length."""

WRITE_DUE = "write due"
"""A prefill worker is about to post a write. Not a state, but a moment at which it can be struck."""

TABLES: dict[Role, tuple[str, ...]] = {
    Role.ROUTER: tuple(
        f"request {state}" for state in ("queued", "placing", "reserving", "prefilling", "decoding", "ended")
    ),
    Role.PREFILL: (
        *(f"job {state}" for state in ("queued", "announced", "granted", "shipped", "ending")),
        *(f"sequence {state}" for state in ("queued", "prefilling", "pinned", "finished")),
    ),
    Role.DECODE: (
        *(f"receive {state}" for state in ("reserved", "receiving", "stopping", "abandoned")),
        *(f"sequence {state}" for state in ("queued", "reserved", "running", "preempted", "finished")),
    ),
}
"""Every state that a request can be in, by the process that keeps the table."""

BY_HANGING_UP = frozenset({"receive abandoned", "job ending"})
"""States that a request enters when its client leaves at the right moment."""
BY_A_STOPPED_WRITER = frozenset({"receive stopping"})
"""States that a request enters when its writer falls silent."""


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault that happened."""

    kind: str
    victim: str
    state: str | None
    """The state that a request was just entering; None when the fault struck without waiting for one."""
    began_s: float
    ended_s: float
    died: bool


@dataclass(slots=True)
class Record:
    """All faults of a run. Times are seconds since it began."""

    struck: list[Struck] = field(default_factory=list)
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(role and state, kind of fault) -> how often."""
    broken_promises: list[str] = field(default_factory=list)
    """What the supervisor said of a process that was not so."""

    def count(self, kind: str) -> int:
        """Faults of a kind."""
        return sum(one.kind == kind for one in self.struck)

    def hits_of(self, role: Role, state: str) -> int:
        """How often any fault struck as a request entered this state."""
        return sum(n for (where, _), n in self.hits.items() if where == f"{role}: {state}")

    def missed(self) -> list[tuple[Role, str]]:
        """States that no fault has hit."""
        return [(r, s) for r, states in TABLES.items() for s in states if not self.hits_of(r, s)]


class Aims:
    """Chooses states, those hit least first; among equals those tried least, then by chance."""

    def __init__(self, record: Record, rng: random.Random) -> None:
        self._record = record
        self._rng = rng
        self._tried: Counter[tuple[Role, str]] = Counter()

    def next_of(self, roles: Collection[Role]) -> tuple[Role, str]:
        """The next state to aim at, among the tables of ``roles``."""
        states = [(role, state) for role in roles for state in TABLES[role]]
        aim = min(
            states,
            key=lambda aim: (self._record.hits_of(*aim), self._tried[aim], self._rng.random()),
        )
        self._tried[aim] += 1
        return aim


def plan_of(scale: float, rng: random.Random) -> list[str]:
    """The kinds of all faults of a run, in their order; ``scale`` 1.0 is a run of full length.

    One that stops a writer comes early, so that a deployment without a fence is found out early.
    """
    least = 1 if scale > 0 else 0
    plan = [kind for kind, share in SHARES.items() for _ in range(max(least, round(share * scale)))]
    rng.shuffle(plan)
    if STALE_WRITER in plan:
        plan.remove(STALE_WRITER)
        plan.insert(0, STALE_WRITER)
    return plan
