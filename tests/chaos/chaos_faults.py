"""What goes wrong during a run, and when: drawn from the seed, aimed at the states hit least so far."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from chaos_network import Network

from antiphon.cluster.member import Member, MemberState
from antiphon.cluster.supervisor import Supervisor
from antiphon.protocol.identity import Role

KILL, LONG_STOP, SHORT_STOP, CUT, LONG_CUT = "kill", "long stop", "short stop", "cut", "long cut"
STALE_WRITER = "stale writer"
"""A shorter stop of a prefill worker at the moment at which it may write: when it goes on, its first act is a
write into pages that the decode worker has given up on meanwhile."""
SHARES = {KILL: 22, LONG_STOP: 11, SHORT_STOP: 10, CUT: 9, LONG_CUT: 4, STALE_WRITER: 20}
"""Faults of each kind in a run of full length."""
LONGEST_PAUSE_S = 8.0
AIM_S = 4.0
"""How long a fault waits for a request to enter the state it is aimed at before it strikes anyway."""

LONG_AIM_S = 10.0
"""The same for a state that requests rarely enter."""
MOST_EXTRA = 40
"""Faults after the plan, for states that were not hit."""
RARE = ("sequence preempted", "receive stopping", "receive abandoned", "job ending", "request placing")

PROVOKED = {
    "receive stopping": (Role.PREFILL, "job granted", signal.SIGSTOP),
    "receive abandoned": (Role.PREFILL, "job granted", signal.SIGSTOP),
    "job ending": (Role.DECODE, "receive receiving", signal.SIGKILL),
}
"""States that only trouble at a peer leads to: whom to strike, in which state, with what."""

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

    def count(self, kind: str) -> int:
        """Faults of a kind."""
        return sum(one.kind == kind for one in self.struck)


class Faults:
    """Injects a plan of faults into a running deployment."""

    def __init__(
        self,
        supervisor: Supervisor,
        actors: dict[str, Any],
        network: Network,
        rng: random.Random,
        *,
        lease_s: float,
        began: float,
    ) -> None:
        self._supervisor = supervisor
        self._actors = actors
        self._network = network
        self._rng = rng
        self._lease_s = lease_s
        self._began = began
        self._busy: set[str] = set()
        self._aimed: Counter[tuple[Role, str]] = Counter()
        """How often a fault waited for this state."""
        self._provoked: set[asyncio.Task[None]] = set()
        self.record = Record()

    async def run(self, scale: float, progress: Callable[[], float]) -> None:
        """Every fault of the plan, spread over the run, several under way at a time.

        ``progress`` is the share of the requests that have ended. A fault waits for its share of them, but
        not for ever: requests may be waiting for just this process to come back.
        """
        least = 1 if scale > 0 else 0
        plan = [kind for kind, share in SHARES.items() for _ in range(max(least, round(share * scale)))]
        self._rng.shuffle(plan)
        async with asyncio.TaskGroup() as group:
            for index, kind in enumerate(plan):
                group.create_task(self._strike(kind))
                await asyncio.sleep(self._rng.uniform(0.5, 3.0))
                for _ in range(round(LONGEST_PAUSE_S / 0.1)):
                    if progress() >= (index + 1) / len(plan):
                        break
                    await asyncio.sleep(0.1)
        if scale >= 1:
            await self._reach_every_state()

    async def _reach_every_state(self) -> None:
        """Shorter stops, aimed at the states that no fault has hit."""
        for _ in range(MOST_EXTRA):
            hit = {where for where, _ in self.record.hits}
            missed = [(r, s) for r, states in TABLES.items() for s in states if f"{r}: {s}" not in hit]
            if not missed:
                return
            await self._stop_at(*self._rng.choice(missed))

    async def _stop_at(self, role: Role, state: str) -> None:
        """A shorter stop of a process of this role as a request enters this state; none if none does."""
        running = [
            m for m in self._supervisor.members if m.state is MemberState.RUNNING and m.spec.role is role
        ]
        running = [m for m in running if m.spec.worker_id not in self._busy]
        if not running:
            await asyncio.sleep(1.0)
            return
        member = self._rng.choice(running)
        self._busy.add(member.spec.worker_id)
        try:
            await self._hit(SHORT_STOP, member, state)
        finally:
            self._busy.discard(member.spec.worker_id)

    async def _strike(self, kind: str) -> None:
        if kind in (CUT, LONG_CUT):
            await self._cut(kind)
            return
        if kind == STALE_WRITER:
            await self._stop_at(Role.PREFILL, "job granted")
            return
        member = await self._choose()
        name = member.spec.worker_id
        self._busy.add(name)
        try:
            await self._hit(kind, member)
        finally:
            self._busy.discard(name)

    async def _choose(self) -> Member:
        """A running process that nothing else is happening to; the last of its role only now and then."""
        while True:
            free = [
                member
                for member in self._supervisor.members
                if member.state is MemberState.RUNNING and member.spec.worker_id not in self._busy
            ]
            role = self._rng.choices((Role.ROUTER, Role.PREFILL, Role.DECODE), (1, 2, 2))[0]
            of_role = [member for member in free if member.spec.role is role]
            if len(of_role) > 1 or (of_role and self._rng.random() < 0.1):
                return self._rng.choice(of_role)
            await asyncio.sleep(0.2)

    async def _hit(self, kind: str, member: Member, state: str | None = None) -> None:
        """Strike as a request enters ``state``; absent, the one that was aimed at least so far."""
        name, role = member.spec.worker_id, member.spec.role
        extra = state is not None
        state = state or min(TABLES[role], key=lambda s: (self._aimed[role, s], self._rng.random()))
        self._aimed[role, state] += 1
        number = signal.SIGKILL if kind == KILL else signal.SIGSTOP
        if state in PROVOKED:
            await self._provoke(*PROVOKED[state])
        actor = self._actors[name]
        try:
            process = psutil.Process(await actor.pid())
            await actor.arm(state, int(number))
        except Exception:  # another fault was faster
            return
        aimed = await self._struck(process, LONG_AIM_S if extra or state in RARE else AIM_S)
        began = self._now()
        if extra and not aimed:
            await self._disarm(name)
            return
        if not aimed:
            _send(process.pid, number)
        if kind == LONG_STOP:
            await asyncio.sleep(self._lease_s + 1.0)
        elif kind == SHORT_STOP:
            await asyncio.sleep(self._rng.uniform(0.6 if extra else 0.3, 0.8) * self._lease_s)
        if kind != KILL:
            _send(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.1)
        died = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        if aimed:
            self.record.hits[f"{role}: {state}", kind] += 1
        self.record.struck.append(Struck(kind, name, state if aimed else None, began, self._now(), died))

    async def _disarm(self, name: str) -> None:
        try:
            await self._actors[name].disarm()
        except Exception:  # it is dead or stopped: the strike came after all
            return

    async def _provoke(self, role: Role, state: str, number: signal.Signals) -> None:
        """A fault at a peer, which lasts while the one that it leads up to is under way."""
        others = [
            m for m in self._supervisor.members if m.spec.role is role and m.state is MemberState.RUNNING
        ]
        others = [m for m in others if m.spec.worker_id not in self._busy]
        if not others:
            return
        name = self._rng.choice(others).spec.worker_id
        self._busy.add(name)
        try:
            process = psutil.Process(await self._actors[name].pid())
            await self._actors[name].arm(state, int(number))
        except Exception:  # another fault was faster
            self._busy.discard(name)
            return
        task = asyncio.create_task(self._finish_provoked(role, name, state, number, process))
        self._provoked.add(task)
        task.add_done_callback(self._provoked.discard)

    async def _finish_provoked(
        self, role: Role, name: str, state: str, number: signal.Signals, process: psutil.Process
    ) -> None:
        try:
            if not await self._struck(process, AIM_S):
                await self._actors[name].disarm()
                return
            began = self._now()
            kind = KILL
            if number is signal.SIGSTOP:
                kind = SHORT_STOP
                await asyncio.sleep(0.8 * self._lease_s)
                _send(process.pid, signal.SIGCONT)
            self.record.hits[f"{role}: {state}", kind] += 1
            self.record.struck.append(Struck(kind, name, state, began, self._now(), kind == KILL))
        finally:
            self._busy.discard(name)

    async def _struck(self, process: psutil.Process, aim_s: float) -> bool:
        """Whether the armed signal came in time."""
        deadline = time.monotonic() + aim_s
        while time.monotonic() < deadline:
            try:
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    return True
            except psutil.NoSuchProcess:
                return True
            await asyncio.sleep(0.02)
        return False

    async def _cut(self, kind: str) -> None:
        """A link between two processes loses everything for a while."""
        names = {
            role: [m.spec.worker_id for m in self._supervisor.members if m.spec.role is role] for role in Role
        }
        one = self._rng.choice(names[self._rng.choice((Role.ROUTER, Role.PREFILL, Role.PREFILL))])
        others = (
            names[Role.DECODE] if one in names[Role.PREFILL] else names[Role.PREFILL] + names[Role.DECODE]
        )
        other = self._rng.choice(others)
        factor = self._rng.uniform(1.3, 1.8) if kind == LONG_CUT else self._rng.uniform(0.1, 0.7)
        began = self._now()
        self._network.cut(one, other)
        try:
            await asyncio.sleep(factor * self._lease_s)
        finally:
            self._network.mend(one, other)
        self.record.struck.append(Struck(kind, f"{one} - {other}", None, began, self._now(), False))

    def _now(self) -> float:
        return time.monotonic() - self._began


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it is gone, which is as well
