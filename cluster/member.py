"""One process of a deployment over all its lives.

Life of one member, from launch to the end of the deployment:

    STARTING --start() returned--> RUNNING --gone, failed or silent for a lease--> LOST
        ^                            |                                              |
        |                            +--asked to end--> DRAINING --drained--> LOST  |
        +--------------- after a backoff, at once when it was asked to -------------+

A member that is lost is killed before anybody hears that it is gone: a peer that reads of its death may rely
on it that this life writes nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import structlog

from antiphon.cluster.process import Launcher, ProcessDied, ProcessHandle, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.protocol.identity import Topology, WorkerAddress

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
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """What is known about one process of the plan."""

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
    essential: bool = True
    """Part of the plan: a first life that cannot start ends the deployment."""
    start_error: str | None = None
    """Why the first life of one that is not essential could not start; none follows."""
    asked_to_end: bool = False
    """This life ends on purpose: its end is no failure."""
    retired: bool = False
    """No life follows this one; set by ``retire``, or when none could begin."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by ``retire``, for one that waits for its next life."""
    task: asyncio.Task[None] | None = None
    """Runs its lives."""

    @property
    def up(self) -> bool:
        """It has started and is not known to be gone."""
        return self.state in (MemberState.RUNNING, MemberState.DRAINING)

    def retire(self) -> None:
        """Let no life follow this one, nor the one that was lost."""
        self.retired = True
        self.given_up.set()


def restart_delay_s(failures: int) -> float:
    """Seconds to wait before the next life, after ``failures`` lives lost in a row (at least 1)."""
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 16)))


class MemberWatcher(Protocol):
    """Whoever decides about members; called on their event loop."""

    @property
    def topology(self) -> Topology:
        """What a new life is told about the others."""

    def on_change(self) -> None:
        """A member came or went."""

    def on_status(self, member: Member, status: ProcessStatus) -> None:
        """A member answered."""

    def on_fatal(self, error: Exception) -> None:
        """A member's first life cannot start, or a defect came to light: nothing more will be tried."""


class MemberLives:
    """Runs the lives of one member one after another."""

    def __init__(
        self,
        member: Member,
        launcher: Launcher,
        watcher: MemberWatcher,
        *,
        lease_s: float,
        heartbeat_s: float,
    ) -> None:
        self._member = member
        self._launcher = launcher
        self._watcher = watcher
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s

    async def run(self) -> None:
        """Until the member is retired or cannot start at all."""
        member, worker_id = self._member, self._member.spec.worker_id
        while True:
            began = time.monotonic()
            member.state = MemberState.STARTING
            member.asked_to_end = False
            member.handle = self._launcher.launch(member.spec)
            try:
                reason = await self._one_life(member, member.handle)
            except StartFailed as error:
                if not member.started.is_set():
                    self._never_started(member, error)
                    return
                reason = str(error)
            except ProcessDied as error:
                reason = str(error)
            except Exception as error:  # a defect of the supervisor itself must not end in silence
                self._watcher.on_fatal(error)
                raise
            member.handle.kill()
            await member.handle.wait_dead()
            member.state, member.address, member.status = MemberState.LOST, None, None
            member.told_version = -1
            self._watcher.on_change()
            if not member.retired:
                delay_s = self._backoff_s(member, time.monotonic() - began)
                log.warning("lost", worker_id=worker_id, reason=reason, restart_in_s=delay_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await member.given_up.wait()
            if member.retired:  # perhaps during the backoff
                log.info("retired", worker_id=worker_id)
                return
            member.restarts += 1

    def _never_started(self, member: Member, error: StartFailed) -> None:
        if member.essential:
            self._watcher.on_fatal(StartFailed(f"{member.spec.worker_id}: {error}"))
            return
        member.retired, member.start_error = True, str(error)
        if member.handle is not None:
            member.handle.kill()

    async def _one_life(self, member: Member, handle: ProcessHandle) -> str:
        member.address = await self._bring_up(handle)
        member.state = MemberState.RUNNING
        self._watcher.on_change()
        member.started.set()
        log.info("running", worker_id=member.spec.worker_id, epoch=member.address.epoch)
        return await self._until_lost(member, handle)

    def _backoff_s(self, member: Member, lived_s: float) -> float:
        if member.asked_to_end:
            member.failures = 0
            return 0.0
        member.failures = 1 if lived_s > STEADY_S else member.failures + 1
        return restart_delay_s(member.failures)

    async def _bring_up(self, handle: ProcessHandle) -> WorkerAddress:
        """Start one life; its death while it starts is an error at once."""
        starting = asyncio.ensure_future(handle.start(self._watcher.topology))
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
                if member.status is not None:
                    if member.status.failed is not None:
                        return member.status.failed
                    self._watcher.on_status(member, member.status)
                await asyncio.wait({dead}, timeout=self._heartbeat_s)
            return dead.result()
        finally:
            dead.cancel()


async def drain_and_stop(member: Member, timeout_s: float) -> bool:
    """Let a member finish what it holds and end its threads; False when something had to be cut off.

    A dead or stuck one is reported, not raised. The process itself still has to be killed.
    """
    handle = member.handle  # of this life: another may begin while this one drains
    if handle is None:
        return True
    try:
        async with asyncio.timeout(timeout_s + STOP_GRACE_S):
            drained = await handle.drain(timeout_s)
            await handle.stop()
    except (ProcessDied, TimeoutError) as error:
        log.warning("unclean stop", worker_id=member.spec.worker_id, reason=str(error) or "timed out")
        return False
    return drained
