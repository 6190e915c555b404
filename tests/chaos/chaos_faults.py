"""Injects the faults of a plan into a running deployment, several at a time on different processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import psutil
from chaos_cuts import Cuts, gone
from chaos_network import Network
from chaos_plan import (
    BY_A_STOPPED_WRITER,
    BY_HANGING_UP,
    CONTROL_CUT,
    CUT,
    KILL,
    LONG_CUT,
    LONG_STOP,
    SHORT_STOP,
    STALE_WRITER,
    WRITE_DUE,
    Aims,
    Record,
    Struck,
    plan_of,
)

from antiphon.cluster.member import Member, MemberState
from antiphon.cluster.supervisor import Supervisor
from antiphon.protocol.identity import Role

LONGEST_PAUSE_S = 8.0
AIM_S = 4.0
"""How long a fault waits for a request to enter the state it is aimed at before it strikes anyway."""
LONG_AIM_S = 10.0
"""The same for a state that requests rarely enter, and for faults that strike nobody who is not in it."""
RETRY_S = 0.2
MOST_EXTRA = 16
"""Faults of each role after the plan, for states that were not hit."""
ALONE = 0.005
"""Chance, five times a second, that a fault takes the last free process of a role."""
LONGEST_STALE_LEASES, REUSE_POLL_S = 0.8, 0.1
"""How long a writer with a write due is stopped while nobody uses its pages, and how often one looks."""
HANG_UP_S, HANG_UP_SHARE = 0.7, 0.3
"""How often, while a fault waits for a client to leave, how many of them do."""


class Faults:
    """One run's faults, drawn from its seed, aimed at the states hit least so far."""

    def __init__(
        self,
        supervisor: Supervisor,
        actors: dict[str, Any],
        network: Network,
        rng: random.Random,
        hang_up: Callable[[float], None],
        *,
        lease_s: float,
        began: float,
    ) -> None:
        """``hang_up`` lets a share of the clients leave at once."""
        self._supervisor = supervisor
        self._actors = actors
        self._rng = rng
        self._hang_up = hang_up
        self._lease_s = lease_s
        self._began = began
        self._busy: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self.record = Record()
        self._aims = Aims(self.record, rng)
        self._cuts = Cuts(supervisor, actors, network, rng, self.record, self._busy, lease_s, began)

    async def run(self, scale: float, progress: Callable[[], float]) -> None:
        """Every fault of the plan, spread over the run, several under way at a time.

        ``progress`` is the share of the requests that have ended. A fault waits for its share of them, but
        not for ever: requests may be waiting for just this process to come back.
        """
        plan = plan_of(scale, self._rng)
        async with asyncio.TaskGroup() as group:
            for index, kind in enumerate(plan):
                group.create_task(self._strike(kind))
                await asyncio.sleep(self._rng.uniform(0.5, 3.0))
                for _ in range(round(LONGEST_PAUSE_S / 0.1)):
                    if progress() >= (index + 1) / len(plan):
                        break
                    await asyncio.sleep(0.1)
        if scale >= 1:
            await asyncio.gather(*(self._reach_every_state_of(role) for role in Role))

    async def _reach_every_state_of(self, role: Role) -> None:
        """Shorter stops, aimed at the states that no fault has hit."""
        for _ in range(MOST_EXTRA):
            missed = [state for of_role, state in self.record.missed() if of_role is role]
            free = self._free(role)
            if not missed:
                return
            if free:
                await self._hit(SHORT_STOP, free, self._rng.choice(missed), only_if_aimed=True)
            else:
                await asyncio.sleep(1.0)

    async def _strike(self, kind: str) -> None:
        if kind in (CUT, LONG_CUT):
            await self._cuts.of_link(kind)
        elif kind == CONTROL_CUT:
            await self._cuts.of_control(self._worker)
        elif kind == STALE_WRITER:
            await self._until(lambda: self._stop_writer(hang_up=True))
        else:
            await self._until(lambda: self._hit_somebody(kind))

    async def _until(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await attempt():
                return
            await asyncio.sleep(RETRY_S)

    # ----------------------------------------------------------------------------------------- whom to strike

    def _free(self, role: Role) -> list[Member]:
        """Running processes of a role that nothing else is happening to."""
        return [
            member
            for member in self._supervisor.members
            if member.spec.role is role
            and member.state is MemberState.RUNNING
            and member.spec.worker_id not in self._busy
        ]

    async def _choose(self, roles: Sequence[Role] = tuple(Role)) -> tuple[list[Member], str]:
        """A state to aim at, and the free processes that keep its table; seldom the last one of a role."""
        while True:
            free = {role: self._free(role) for role in roles}
            open_to = [
                role
                for role, members in free.items()
                if len(members) > 1 or (members and self._rng.random() < ALONE)
            ]
            if open_to:
                role, state = self._aims.next_of(open_to)
                return free[role], state
            await asyncio.sleep(RETRY_S)

    async def _worker(self) -> Member:
        members, _ = await self._choose((Role.PREFILL, Role.DECODE))
        return self._rng.choice(members)

    # ----------------------------------------------------------------------------------------------- signals

    async def _hit(
        self, kind: str, members: Sequence[Member], state: str, *, only_if_aimed: bool = False
    ) -> bool:
        """Strike the first of these processes in which a request enters ``state``.

        When none does in time, one of them is struck all the same, or none ``only_if_aimed``. Whether the
        fault is done with: False when other faults were faster.
        """
        number = signal.SIGKILL if kind == KILL else signal.SIGSTOP
        names = [member.spec.worker_id for member in members]
        role = members[0].spec.role
        self._busy.update(names)
        try:
            trap = await self._set_trap(names, state, number)
            if not trap:
                return False
            patient = only_if_aimed or state in BY_HANGING_UP or state in BY_A_STOPPED_WRITER
            provoking = asyncio.create_task(self._provoke(state))
            victim = await self._sprung(trap, LONG_AIM_S if patient else AIM_S)
            provoking.cancel()
            aimed = victim is not None
            await self._release(trap, victim, role, state)
            if victim is None:
                if only_if_aimed:
                    return True
                victim = self._rng.choice(sorted(trap))
                _send(trap[victim].pid, number)
            self._busy.difference_update(set(names) - {victim})
            await self._last(kind, victim, trap[victim], role, state if aimed else None)
            return True
        finally:
            self._busy.difference_update(names)

    async def _hit_somebody(self, kind: str) -> bool:
        members, state = await self._choose()
        return await self._hit(kind, members, state)

    async def _last(
        self, kind: str, name: str, process: psutil.Process, role: Role, state: str | None
    ) -> None:
        """Let a fault that has struck last as long as its kind does, and note it."""
        began = self._now()
        try:
            if kind == LONG_STOP:
                await asyncio.sleep(self._lease_s + 1.0)
            elif kind == STALE_WRITER:
                await self._until_reused(name)
            elif kind == SHORT_STOP:
                await asyncio.sleep(self._rng.uniform(0.6, 0.8) * self._lease_s)
        finally:
            if kind != KILL:
                _send(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.1)
        if state is not None:
            self.record.hits[f"{role}: {state}", kind] += 1
        self.record.struck.append(Struck(kind, name, state, began, self._now(), gone(process)))

    async def _stop_writer(self, *, hang_up: bool) -> bool:
        """Stop a prefill worker that is about to write, for less than its lease; whether one was."""
        members = self._free(Role.PREFILL)
        names = [member.spec.worker_id for member in members]
        self._busy.update(names)
        try:
            trap = await self._set_trap(names, WRITE_DUE, signal.SIGSTOP)
            victim = await self._sprung(trap, LONG_AIM_S)
            if victim is not None:
                await self._of_decode("forget_given_up", victim)
            if hang_up:
                self._hang_up(1.0)
            await self._release(trap, victim, Role.PREFILL, WRITE_DUE)
            if victim is None:
                return False
            self._busy.difference_update(set(names) - {victim})
            # Its job was granted, and nothing of it is written.
            await self._last(STALE_WRITER, victim, trap[victim], Role.PREFILL, "job granted")
            return True
        finally:
            self._busy.difference_update(names)

    async def _until_reused(self, writer: str) -> None:
        """Until a request runs on pages that this writer may still write, or its lease is nearly over."""
        deadline = time.monotonic() + LONGEST_STALE_LEASES * self._lease_s
        while time.monotonic() < deadline:
            if any(await self._of_decode("reused", writer)):
                return
            await asyncio.sleep(REUSE_POLL_S)

    async def _of_decode(self, question: str, writer: str) -> list[Any]:
        """What the decode workers that can answer say."""
        names = [member.spec.worker_id for member in self._supervisor.members]
        asked = [getattr(self._actors[n], question)(writer) for n in names if n.startswith(Role.DECODE)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _set_trap(self, names: Iterable[str], state: str, number: int) -> dict[str, psutil.Process]:
        """Let a signal strike each of these processes when a request enters a state; those where it will."""
        trap = {}
        for name in names:
            try:
                process = psutil.Process(await self._actors[name].pid())
                await self._actors[name].arm(state, int(number))
            except Exception:  # another fault was faster
                continue
            trap[name] = process
        return trap

    async def _sprung(self, trap: dict[str, psutil.Process], aim_s: float) -> str | None:
        """The first process of a trap that was struck; None when none was in time."""
        deadline = time.monotonic() + aim_s
        while time.monotonic() < deadline:
            for name, process in trap.items():
                if _stopped(process) or gone(process):
                    return name
            await asyncio.sleep(0.02)
        return None

    async def _release(
        self, trap: dict[str, psutil.Process], victim: str | None, role: Role, state: str
    ) -> None:
        """Disarm all but the victim. One that was struck at the same time goes on, if it can, and counts."""
        for name, process in trap.items():
            if name == victim:
                continue
            began = self._now()
            try:
                await self._actors[name].disarm()
            except Exception:  # it is dead or stopped: it was struck as well
                died = gone(process)
                _send(process.pid, signal.SIGCONT)
                kind = KILL if died else SHORT_STOP
                if state != WRITE_DUE:
                    self.record.hits[f"{role}: {state}", kind] += 1
                self.record.struck.append(Struck(kind, name, state, began, self._now(), died))

    async def _provoke(self, state: str) -> None:
        """Make requests enter a state that they seldom do."""
        while state in BY_HANGING_UP:
            self._hang_up(HANG_UP_SHARE)
            await asyncio.sleep(HANG_UP_S)
        while state in BY_A_STOPPED_WRITER:
            stopping = asyncio.create_task(self._stop_a_writer())
            self._background.add(stopping)
            stopping.add_done_callback(self._background.discard)
            await asyncio.shield(stopping)
            await asyncio.sleep(RETRY_S)

    async def _stop_a_writer(self) -> None:
        await self._stop_writer(hang_up=False)

    def _now(self) -> float:
        return time.monotonic() - self._began


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it is gone, which is as well


def _stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
