"""Processes that are plain objects, for tests of the supervisor's decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from antiphon.cluster.process import ProcessDied, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.supervisor import Supervisor
from antiphon.protocol.identity import Role, Topology, WorkerAddress

LEASE_S = 1.0
HEARTBEAT_S = 0.02

SPECS = (
    ProcessSpec("prefill-0", Role.PREFILL, 1, 0, 1),
    ProcessSpec("decode-0", Role.DECODE, 1, 0, 1),
    ProcessSpec("router-0", Role.ROUTER, 1, 0, 1),
)


class FakeProcess:
    """One life that a test can end, silence or fail."""

    def __init__(self, spec: ProcessSpec, epoch: int, journal: list[tuple[str, str, int]]) -> None:
        self.spec = spec
        self.epoch = epoch
        self.journal = journal
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.start_error: Exception | None = None
        self.silent = False
        self.failed: str | None = None
        self.overdue: tuple[tuple[str, int], ...] = ()
        self.topologies: list[Topology] = []
        self.lose_topologies = 0
        self.drain_s = 0.0
        self.times_asked = 0

    def note(self, what: str) -> None:
        self.journal.append((what, self.spec.worker_id, self.epoch))

    def check_alive(self) -> None:
        if self.death.done():
            raise ProcessDied(self.death.result())

    async def start(self, topology: Topology) -> WorkerAddress:
        await asyncio.sleep(0)
        if self.start_error is not None:
            raise self.start_error
        self.check_alive()
        self.note("start")
        return WorkerAddress(self.spec.worker_id, self.spec.role, self.epoch, f"tcp://here:{self.epoch}")

    async def set_topology(self, topology: Topology) -> None:
        self.check_alive()
        if self.lose_topologies:
            self.lose_topologies -= 1
            raise TimeoutError
        self.topologies.append(topology)
        self.journal.append((f"told {topology.version}", self.spec.worker_id, self.epoch))

    async def status(self) -> ProcessStatus:
        self.check_alive()
        self.times_asked += 1
        if self.silent:
            await asyncio.Event().wait()
        return ProcessStatus(
            self.spec.worker_id, True, "", self.failed, 0, 0, self.overdue, pairs=self.pairs()
        )

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """A router sends requests to every worker that it was told of."""
        known = self.topologies[-1] if self.topologies else Topology(0, ())
        return tuple(
            (p.worker_id, d.worker_id)
            for p in known.of_role(Role.PREFILL)
            for d in known.of_role(Role.DECODE)
        )

    async def drain(self, timeout_s: float) -> bool:
        self.check_alive()
        self.note("drain")
        await asyncio.sleep(min(self.drain_s, timeout_s))
        return self.drain_s <= timeout_s

    async def stop(self) -> None:
        self.note("stop")

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)

    def kill(self) -> None:
        if not self.death.done():
            self.note("kill")
            self.death.set_result("killed")


class FakeLauncher:
    """Keeps every life it made, newest last, by worker."""

    def __init__(self) -> None:
        self.lives: dict[str, list[FakeProcess]] = {}
        self.journal: list[tuple[str, str, int]] = []
        self.prepare: Callable[[FakeProcess], None] = lambda process: None
        self.room = 8
        self._epochs = 0

    def launch(self, spec: ProcessSpec) -> FakeProcess:
        self._epochs += 1
        process = FakeProcess(spec, self._epochs, self.journal)
        self.prepare(process)
        self.lives.setdefault(spec.worker_id, []).append(process)
        return process

    async def make_room(self, spec: ProcessSpec) -> None:
        if self.room == 0:
            raise StartFailed("the cluster has no room")
        self.room -= 1

    def free_room(self, spec: ProcessSpec) -> None:
        self.room += 1

    def life(self, worker_id: str) -> FakeProcess:
        return self.lives[worker_id][-1]


@asynccontextmanager
async def supervised(
    launcher: FakeLauncher, specs: tuple[ProcessSpec, ...] = SPECS
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(specs, launcher, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop(0.0)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.01)


def epochs(topology: Topology) -> dict[str, int]:
    return {worker.worker_id: worker.epoch for worker in topology.workers}
