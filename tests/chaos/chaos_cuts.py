"""Cuts of links between processes, and of the one to Ray that the supervisor needs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from chaos_network import Network
from chaos_plan import CONTROL_CUT, LONG_CUT, Record, Struck

from antiphon.cluster.member import Member
from antiphon.cluster.supervisor import Supervisor
from antiphon.protocol.identity import Role

RETRY_S = 0.2
CONTROL_CUT_PATIENCE_S = 60.0
"""Beyond its lease, until a worker that the supervisor cannot reach must be gone."""


class Cuts:
    """Of one run."""

    def __init__(
        self,
        supervisor: Supervisor,
        actors: dict[str, Any],
        network: Network,
        rng: random.Random,
        record: Record,
        busy: set[str],
        lease_s: float,
        began: float,
    ) -> None:
        self._supervisor = supervisor
        self._actors = actors
        self._network = network
        self._rng = rng
        self._record = record
        self._busy = busy
        self._lease_s = lease_s
        self._began = began

    async def of_link(self, kind: str) -> None:
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
        self._record.struck.append(Struck(kind, f"{one} - {other}", None, began, self._now(), False))

    async def of_control(self, choose: Callable[[], Awaitable[Member]]) -> None:
        """Cut a worker off from Ray until it is gone, which must be before the topology lacks it."""
        while True:
            member = await choose()
            name, life = member.spec.worker_id, member.address
            try:
                process = psutil.Process(await self._actors[name].pid())
                break
            except Exception:  # another fault was faster
                await asyncio.sleep(RETRY_S)
        self._busy.add(name)
        began = self._now()
        try:
            with self._network.control_cut(process.pid) as refresh:
                deadline = time.monotonic() + self._lease_s + CONTROL_CUT_PATIENCE_S
                while not gone(process) and time.monotonic() < deadline:
                    left = life not in self._supervisor.topology.workers
                    if left and not gone(process):
                        self._record.broken_promises.append(f"{name} left the topology while it lived")
                        break
                    refresh()
                    await asyncio.sleep(0.05)
            died = gone(process)
            if not died:
                self._record.broken_promises.append(f"{name} lives though nobody can reach it")
            self._record.struck.append(Struck(CONTROL_CUT, name, None, began, self._now(), died))
        finally:
            self._busy.discard(name)

    def _now(self) -> float:
        return time.monotonic() - self._began


def gone(process: psutil.Process) -> bool:
    """Whether it can do nothing any more."""
    try:
        return bool(process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True
