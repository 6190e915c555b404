"""Keeps every process of a deployment alive and tells each of them who else is.

Life of one member, from launch to the end of the deployment:

    STARTING --start() returned--> RUNNING --gone, failed or silent for a lease--> LOST
        ^                                                                            |
        +------------------------------ after a backoff -----------------------------+

A change of RUNNING members is a new version of the topology and is pushed to all of them. A member that is
lost is killed before the topology without it is published: a peer that reads of its death may rely on it
that this life writes nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from antiphon.cluster.process import Launcher, ProcessDied, ProcessHandle, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.protocol.identity import Role, Topology, WorkerAddress

log = structlog.get_logger("antiphon.supervisor")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STOP_GRACE_S = 5.0
"""What a process gets, beyond the time to drain, to end its threads and links before it is killed."""

STEADY_S = 60.0
"""A member that ran for this long starts again without a history of failures."""


class MemberState(StrEnum):
    """Where a member stands; the moves are drawn above."""

    STARTING = "starting"
    RUNNING = "running"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One process of the plan over all its lives."""

    spec: ProcessSpec
    state: MemberState = MemberState.STARTING
    handle: ProcessHandle | None = None
    address: WorkerAddress | None = None
    status: ProcessStatus | None = None
    told_version: int = -1
    """Version of the topology that this life has confirmed."""
    failures: int = 0
    """Lives lost in a row."""
    restarts: int = 0
    """Lives after the first."""
    started: asyncio.Event = field(default_factory=asyncio.Event)


def restart_delay_s(failures: int) -> float:
    """Seconds to wait before the next life, after ``failures`` lives lost in a row (at least 1)."""
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 16)))


class Supervisor:
    """Owns the members' lives and the topology. All methods belong to one event loop."""

    def __init__(
        self, specs: Iterable[ProcessSpec], launcher: Launcher, *, lease_s: float, heartbeat_s: float
    ) -> None:
        """``lease_s``: a member silent for this long is killed. ``heartbeat_s``: how often each is asked."""
        self._launcher = launcher
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._members = {spec.worker_id: Member(spec) for spec in specs}
        self._topology = Topology(0, ())
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._fatal: asyncio.Future[None] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in the order of the plan."""
        return tuple(self._members.values())

    @property
    def topology(self) -> Topology:
        """The workers that run now."""
        return self._topology

    async def start(self) -> None:
        """Start every member and return once all of them run.

        Raises:
            StartFailed: a first life could not start; nothing more will be tried.
        """
        self._fatal = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep_alive(member)) for member in self.members]
        self._tasks.append(asyncio.create_task(self._publish_changes()))
        everyone = asyncio.create_task(self._all_started())
        try:
            await asyncio.wait([everyone, self._fatal], return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                self._fatal.result()
        finally:
            everyone.cancel()

    async def _all_started(self) -> None:
        for member in self.members:
            await member.started.wait()

    async def failure(self) -> None:
        """Wait for an error that the supervisor cannot mend, and raise it."""
        if self._fatal is None:
            raise RuntimeError("the supervisor was not started")
        await asyncio.shield(self._fatal)

    async def stop(self, drain_timeout_s: float) -> bool:
        """Drain routers, then workers, and end every process; True when nothing had to be cut off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        deadline = time.monotonic() + drain_timeout_s
        clean = True
        try:
            for roles in ((Role.ROUTER,), (Role.DECODE, Role.PREFILL)):
                running = [m for m in self.members if m.spec.role in roles and m.state is MemberState.RUNNING]
                clean &= all(await asyncio.gather(*(self._end(m, deadline) for m in running)))
        finally:  # a second signal cancels the draining, and nothing may be left behind all the same
            for member in self.members:
                if member.handle is not None:
                    member.handle.kill()
        return clean

    async def _end(self, member: Member, deadline: float) -> bool:
        """Drain and stop one running member; a dead or stuck one is reported, not raised."""
        if member.handle is None:
            return True
        left_s = max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s + STOP_GRACE_S):
                drained = await member.handle.drain(left_s)
                await member.handle.stop()
        except (ProcessDied, TimeoutError) as error:
            log.warning("unclean stop", worker_id=member.spec.worker_id, reason=str(error) or "timed out")
            return False
        return drained

    async def _keep_alive(self, member: Member) -> None:
        """Run one member's lives one after another."""
        worker_id = member.spec.worker_id
        while True:
            began = time.monotonic()
            member.state = MemberState.STARTING
            member.handle = self._launcher.launch(member.spec)
            try:
                member.address = await self._bring_up(member, member.handle)
                member.state = MemberState.RUNNING
                self._topology_changed()
                member.started.set()
                log.info("running", worker_id=worker_id, epoch=member.address.epoch)
                reason = await self._until_lost(member, member.handle)
            except StartFailed as error:
                if not member.started.is_set():
                    self._give_up(StartFailed(f"{worker_id}: {error}"))
                    return
                reason = str(error)
            except ProcessDied as error:
                reason = str(error)
            except Exception as error:  # a defect of the supervisor itself must not end in silence
                self._give_up(error)
                raise
            member.handle.kill()
            await member.handle.wait_dead()
            member.state, member.address, member.status, member.told_version = (
                MemberState.LOST,
                None,
                None,
                -1,
            )
            self._topology_changed()
            member.failures = 1 if time.monotonic() - began > STEADY_S else member.failures + 1
            delay_s = restart_delay_s(member.failures)
            log.warning("lost", worker_id=worker_id, reason=reason, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            member.restarts += 1

    async def _bring_up(self, member: Member, handle: ProcessHandle) -> WorkerAddress:
        """Start one life; its death while it starts is an error at once."""
        starting = asyncio.ensure_future(handle.start(self._topology))
        dead = asyncio.ensure_future(handle.wait_dead())
        try:
            await asyncio.wait({starting, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise ProcessDied(f"died while starting: {dead.result()}")
            return starting.result()
        finally:
            starting.cancel()
            dead.cancel()

    async def _until_lost(self, member: Member, handle: ProcessHandle) -> str:
        """Watch a running life; return why it must be replaced."""
        dead = asyncio.ensure_future(handle.wait_dead())
        heard = time.monotonic()
        try:
            while not dead.done():
                try:
                    async with asyncio.timeout(self._lease_s):
                        member.status = await handle.status()
                    heard = time.monotonic()
                except TimeoutError:
                    pass
                except ProcessDied as error:
                    return str(error)
                silent_s = time.monotonic() - heard
                if silent_s >= self._lease_s:
                    return f"silent for {silent_s:.1f} s, longer than its lease"
                if member.status is not None and member.status.failed is not None:
                    return member.status.failed
                self._kill_overdue_writers(member.status)
                if member.told_version != self._topology.version:
                    self._changed.set()
                await asyncio.wait({dead}, timeout=self._heartbeat_s)
            return dead.result()
        finally:
            dead.cancel()

    def _kill_overdue_writers(self, status: ProcessStatus | None) -> None:
        """End lives that hold the right to write a peer's pages longer than their lease."""
        for worker_id, epoch in status.overdue_writers if status is not None else ():
            writer = self._members.get(worker_id)
            if writer is None or writer.handle is None or writer.address is None:
                continue
            if writer.address.epoch == epoch:
                log.warning("killing a writer past its lease", worker_id=worker_id, epoch=epoch)
                writer.handle.kill()

    def _topology_changed(self) -> None:
        workers = tuple(
            m.address for m in self.members if m.address is not None and m.spec.role is not Role.ROUTER
        )
        if workers != self._topology.workers:
            self._topology = Topology(self._topology.version + 1, workers)
            self._changed.set()

    async def _publish_changes(self) -> None:
        """Push each new topology to every running member; one that missed it is told again."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            topology = self._topology
            behind = [
                m
                for m in self.members
                if m.state is MemberState.RUNNING and m.told_version != topology.version
            ]
            await asyncio.gather(*(self._tell(member, topology) for member in behind))

    async def _tell(self, member: Member, topology: Topology) -> None:
        handle = member.handle
        if handle is None:
            return
        try:
            async with asyncio.timeout(self._lease_s):
                await handle.set_topology(topology)
        except (ProcessDied, TimeoutError) as error:
            # The member's own watch decides about its life; it is told again after its next answer.
            log.warning("not told", worker_id=member.spec.worker_id, reason=str(error) or "timed out")
        else:
            if member.handle is handle:  # not a later life, which has heard nothing yet
                member.told_version = topology.version

    def _give_up(self, error: Exception) -> None:
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)
