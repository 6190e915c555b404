"""Keeps every process of a deployment alive, tells each of them who else is, and changes how many there are.

A change of the members that are up is a new version of the topology and is pushed to all of them. Routers are
in it as well: a worker ends the requests of a router that has left it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Iterable
from dataclasses import replace

import structlog

from antiphon.cluster.member import Member, MemberLives, MemberState, drain_and_stop
from antiphon.cluster.process import Launcher, ProcessDied, ProcessHandle, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.identity import Role, Topology

log = structlog.get_logger("antiphon.supervisor")

SETTLE_POLL_S = 0.05


def another_of(spec: ProcessSpec, taken: Collection[str]) -> ProcessSpec:
    """One more process like this one, under the first id of its role that is not taken."""
    worker_id = next(name for i in itertools.count() if (name := f"{spec.role}-{i}") not in taken)
    return replace(spec, worker_id=worker_id)


class OperationFailed(AntiphonError):
    """A change of the deployment was not carried out, or not to its end; the message says how far it came."""


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
        self._publishing: asyncio.Task[None] | None = None
        self._fatal: asyncio.Future[None] | None = None
        self._operation = asyncio.Lock()
        """Held by whoever changes the set of members or restarts them on purpose."""

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in the order of the plan; later ones at the end."""
        return tuple(self._members.values())

    @property
    def topology(self) -> Topology:
        """The workers and routers that run now."""
        return self._topology

    def of_role(self, role: Role) -> list[Member]:
        """Members of one role that are not on their way out."""
        return [m for m in self._members.values() if m.spec.role is role and not m.retired]

    async def start(self) -> None:
        """Start every member and return once all of them run.

        Raises:
            StartFailed: a first life could not start; nothing more will be tried.
        """
        self._fatal = asyncio.get_running_loop().create_future()
        self._publishing = asyncio.create_task(self._publish_changes())
        for member in self.members:
            self._keep_alive(member)
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
        tasks = [m.task for m in self.members if m.task is not None]
        tasks += [self._publishing] if self._publishing is not None else []
        for task in tasks:
            task.cancel()
        deadline = time.monotonic() + drain_timeout_s
        clean = True
        asking: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            asking += (asyncio.create_task(self._ask_on(m.handle)) for m in self.members if m.up and m.handle)
            for roles in ((Role.ROUTER,), (Role.DECODE, Role.PREFILL)):
                running = [m for m in self.members if m.spec.role in roles and m.up]
                left_s = max(0.0, deadline - time.monotonic())
                clean &= all(await asyncio.gather(*(drain_and_stop(m, left_s) for m in running)))
        finally:  # a second signal cancels all of this, and nothing may be left behind all the same
            for task in asking:
                task.cancel()
            for member in self.members:
                if member.handle is not None:
                    member.handle.kill()
        return clean

    async def _ask_on(self, handle: ProcessHandle) -> None:
        """A process that nobody asks ends itself, which none is to do while others drain."""
        while True:
            try:
                await handle.status()
            except ProcessDied:
                return
            await asyncio.sleep(self._heartbeat_s)

    # ------------------------------------------------------------------------------------------ operations

    async def scale(self, role: Role, replicas: int, drain_timeout_s: float) -> None:
        """Make a pool this large: start members and wait until they serve, or drain and end the youngest.

        Raises:
            OperationFailed: no such size, or a new member could not start.
        """
        if replicas < 1:
            raise OperationFailed(f"{role}={replicas}: a deployment needs at least one {role} process")
        async with self._operation:
            await self._scale(role, replicas, drain_timeout_s)

    async def roll(self, drain_timeout_s: float) -> int:
        """Restart every process, one at a time, while the others serve; how many there were.

        A pool of one worker gets a second one for the time being; without room for it nothing of the pool is
        restarted. A single router cannot be doubled, because both would need its port: clients find nobody
        while it restarts.

        Raises:
            OperationFailed: a process did not come back, or a second one found no room.
        """
        async with self._operation:
            restarted: list[str] = []
            try:
                for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
                    await self._roll_pool(role, drain_timeout_s, restarted)
            except OperationFailed as error:
                before = ", ".join(restarted) or "nothing"
                raise OperationFailed(f"{error}; restarted before that: {before}") from error
            return len(restarted)

    async def _roll_pool(self, role: Role, drain_timeout_s: float, restarted: list[str]) -> None:
        originals = self.of_role(role)
        alone = len(originals) == 1 and role is not Role.ROUTER
        if alone:
            await self._scale(role, 2, drain_timeout_s)
        for member in originals:
            await self._restart(member, drain_timeout_s)
            restarted.append(member.spec.worker_id)
        if alone:
            await self._scale(role, 1, drain_timeout_s)

    async def replace_workers(
        self, specs: Iterable[ProcessSpec], *, drain_timeout_s: float, ready_timeout_s: float
    ) -> int:
        """Start workers like ``specs`` beside those that run, and drain and end the latter once all serve.

        Ids are given anew. Decode workers leave before prefill workers, which they may still need. Returns
        how many left.

        Raises:
            OperationFailed: the new ones found no room, could not start or did not come to serve within
                ``ready_timeout_s``; they are gone again, and those that ran go on.
        """
        async with self._operation:
            leaving = [self.of_role(role) for role in (Role.DECODE, Role.PREFILL)]
            added: list[Member] = []
            try:
                for spec in specs:
                    added.append(await self._add(spec))
                async with asyncio.timeout(ready_timeout_s):
                    for member in added:
                        await self._serves(member)
            except (OperationFailed, TimeoutError) as error:
                reason = str(error) or f"the new workers did not come to serve within {ready_timeout_s:g} s"
                await asyncio.sleep(0)  # the last one's first life may not have been launched yet
                left = [m for m in added if m.spec.worker_id in self._members]
                await asyncio.gather(*(self._retire(m, drain_timeout_s) for m in left))
                raise OperationFailed(f"nothing was replaced: {reason}") from error
            for members in leaving:
                await asyncio.gather(*(self._retire(m, drain_timeout_s) for m in members))
            return sum(map(len, leaving))

    async def _scale(self, role: Role, replicas: int, drain_timeout_s: float) -> None:
        members = self.of_role(role)
        if not members:
            raise OperationFailed(f"{role}={replicas}: this deployment has no {role} processes")
        log.info("scaling", role=role, now=len(members), wanted=replicas)
        added = [await self._add(members[0].spec) for _ in range(len(members), replicas)]
        for member in added:
            await self._serves(member)
        await asyncio.gather(*(self._retire(member, drain_timeout_s) for member in members[replicas:]))

    async def _add(self, like: ProcessSpec) -> Member:
        spec = another_of(like, {m.spec.worker_id for m in self.members})
        try:
            await self._launcher.make_room(spec)
        except StartFailed as error:
            raise OperationFailed(f"{spec.worker_id}: {error}") from error
        member = self._members[spec.worker_id] = Member(spec, essential=False)
        self._keep_alive(member)
        return member

    async def _retire(self, member: Member, drain_timeout_s: float) -> None:
        member.retire()
        await self._end(member, drain_timeout_s)
        if member.task is not None:
            await member.task
        self._forget(member)

    def _forget(self, member: Member) -> None:
        del self._members[member.spec.worker_id]
        self._launcher.free_room(member.spec)

    async def _restart(self, member: Member, drain_timeout_s: float) -> None:
        log.info("restarting", worker_id=member.spec.worker_id)
        if member.state is MemberState.RUNNING:
            await self._end(member, drain_timeout_s)
        await self._serves(member)

    async def _end(self, member: Member, drain_timeout_s: float) -> None:
        """Drain one life and end it; its watch sees the end and goes on from there."""
        handle = member.handle  # should it die while it drains, the next life is not to be ended
        member.asked_to_end = True
        if member.state is MemberState.RUNNING:
            member.state = MemberState.DRAINING
            if not await drain_and_stop(member, drain_timeout_s):
                log.warning("drain cut short", worker_id=member.spec.worker_id, after_s=drain_timeout_s)
        if handle is not None:
            handle.kill()
            await handle.wait_dead()

    async def _serves(self, member: Member) -> None:
        """Wait until a member does its part and, for a worker, until every router that runs knows it."""
        while not (member.state is MemberState.RUNNING and member.status is not None and member.status.ready):
            if member.start_error is not None:
                self._forget(member)
                raise OperationFailed(f"{member.spec.worker_id}: {member.start_error}")
            await asyncio.sleep(SETTLE_POLL_S)
        worker_id = member.spec.worker_id
        while member.spec.role is not Role.ROUTER:
            routers = [m for m in self.of_role(Role.ROUTER) if m.state is MemberState.RUNNING]
            if all(
                m.told_version == self._topology.version
                and m.status is not None
                and any(worker_id in pair for pair in m.status.pairs)
                for m in routers
            ):
                return
            await asyncio.sleep(SETTLE_POLL_S)

    # ---------------------------------------------------------------------------------------- MemberWatcher

    def on_change(self) -> None:
        """See MemberWatcher."""
        workers = tuple(m.address for m in self.members if m.address is not None)
        if workers != self._topology.workers:
            self._topology = Topology(self._topology.version + 1, workers)
            self._changed.set()

    def on_status(self, member: Member, status: ProcessStatus) -> None:
        """See MemberWatcher. Ends lives that may write a peer's pages for longer than their lease."""
        for worker_id, epoch in status.overdue_writers:
            writer = self._members.get(worker_id)
            if writer is None or writer.handle is None or writer.address is None:
                continue
            if writer.address.epoch == epoch:
                log.warning("killing a writer past its lease", worker_id=worker_id, epoch=epoch)
                writer.handle.kill()
        if member.told_version != self._topology.version:
            self._changed.set()

    def on_fatal(self, error: Exception) -> None:
        """See MemberWatcher."""
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    # -------------------------------------------------------------------------------------------- topology

    def _keep_alive(self, member: Member) -> None:
        lives = MemberLives(
            member, self._launcher, self, lease_s=self._lease_s, heartbeat_s=self._heartbeat_s
        )
        member.task = asyncio.create_task(lives.run())

    async def _publish_changes(self) -> None:
        """Push each new topology to every member that is up; one that missed it is told again."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            topology = self._topology
            behind = [m for m in self.members if m.up and m.told_version != topology.version]
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
