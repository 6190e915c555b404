"""One life of a worker or router as Ray actors: one actor for each rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.cluster.process import ProcessDied, ProcessStatus, StartFailed
from antiphon.cluster.process_identity import ProcessIdentity
from antiphon.protocol.errors import AntiphonError, RankLostError
from antiphon.protocol.identity import Topology, WorkerAddress

FOLLOWER_REASON_S = 5.0
"""How long rank 0's failure to start waits for the reason, which another rank may know better."""
GONE_POLL_S = 0.02
SEEN_TO_END = "worker process has died"
"""In Ray's reason when a node saw the process end; the others do not mean that it did."""


class RayProcess:
    """Implements ``process.ProcessHandle``.

    A worker lives as long as all its ranks. When one is gone the others are killed, and it counts as dead
    only when none is left: nothing of it writes any more. That an actor is dead is not enough, since Ray says
    so of one that it was asked to kill and could not reach. A process of this machine is looked for. One
    elsewhere is gone when Ray saw it end, or it said that it stopped, or else when its lifeline has run out.

    Args:
        first: the actor of rank 0, or of a router.
        others: actors of ranks 1 and up.
        on_started: called with the address of a life that has started.
        shares_gpus: every rank is to see the GPUs of all of them.
        gone_after_s: so long after it was last asked for its status, a process has ended itself.
    """

    def __init__(
        self,
        first: Any,
        others: Sequence[Any],
        on_started: Callable[[WorkerAddress], None],
        *,
        shares_gpus: bool = False,
        gone_after_s: float = 0.0,
    ) -> None:
        self._actor = first
        self._others = tuple(others)
        self._on_started = on_started
        self._shares_gpus = shares_gpus
        self._following: list[asyncio.Future[None]] = []
        self._asking: dict[int, asyncio.Future[None]] = {}
        self._gone_after_s = gone_after_s
        self._asked_at = time.monotonic()
        """Nobody has asked it since."""
        self._identities: tuple[ProcessIdentity, ...] = ()
        self._stopped = False
        """It said that it ended its threads and links."""
        # Pending for as long as the actors live: Ray fails it the moment a process is gone.
        self._death = asyncio.ensure_future(self._await_death())

    async def start(self, topology: Topology) -> WorkerAddress:
        """See ProcessHandle."""
        actors = (self._actor, *self._others)
        self._identities = tuple([await self._call_on(actor, "identity") for actor in actors])
        if self._others:
            await self._gather_ranks()
        address = await self._first_started(topology)
        self._on_started(address)
        return address

    async def _first_started(self, topology: Topology) -> WorkerAddress:
        """Where rank 0 listens; a rank that ends before that is why it never will."""
        starting = asyncio.ensure_future(self._call("start", topology))
        try:
            await asyncio.wait({starting, *self._following}, return_when=asyncio.FIRST_COMPLETED)
            ended = [following for following in self._following if following.done()]
            if ended and not starting.done():
                ended[0].result()
                raise ProcessDied("a rank ended while rank 0 was starting")
            address: WorkerAddress = await starting
        except ProcessDied as error:
            raise await self._better_reason(error) from error
        finally:
            starting.cancel()
        return address

    async def set_topology(self, topology: Topology) -> None:
        """See ProcessHandle."""
        await self._call("set_topology", topology)

    async def status(self) -> ProcessStatus:
        """See ProcessHandle."""
        self._asked_at = time.monotonic()
        self._ask_others()
        status: ProcessStatus = await self._call("status")
        return status

    def _ask_others(self) -> None:
        """Tell ranks other than 0 that somebody watches; one that has not answered yet is not asked again."""
        for rank, actor in enumerate(self._others, start=1):
            last = self._asking.get(rank)
            if last is None or last.done():
                self._asking[rank] = asking = asyncio.ensure_future(self._call_on(actor, "asked"))
                asking.add_done_callback(_note_outcome)

    async def drain(self, timeout_s: float) -> bool:
        """See ProcessHandle."""
        drained: bool = await self._call("drain", timeout_s)
        return drained

    async def stop(self) -> None:
        """See ProcessHandle."""
        await self._call("stop")
        self._stopped = True

    async def wait_dead(self) -> str:
        """See ProcessHandle."""
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        """See ProcessHandle."""
        import ray

        for actor in (self._actor, *self._others):
            ray.kill(actor, no_restart=True)

    async def _gather_ranks(self) -> None:
        """Let the other ranks meet rank 0; what they do from then on ends with the worker."""
        actors = (self._actor, *self._others)
        if self._shares_gpus:
            gpus = [await self._call_on(actor, "gpu") for actor in actors]
            for actor in actors:
                await self._call_on(actor, "see_gpus", gpus)
        port = await self._call("open_ranks", len(actors))
        self._following = [
            asyncio.ensure_future(self._call_on(actor, "follow", port)) for actor in self._others
        ]
        for following in self._following:
            following.add_done_callback(_note_outcome)

    async def _better_reason(self, error: ProcessDied) -> AntiphonError:
        """What another rank failed with, when that is why rank 0 could not start."""
        if self._following:
            await asyncio.wait(self._following, timeout=FOLLOWER_REASON_S)
        for following in self._following:
            reason = following.exception() if following.done() and not following.cancelled() else None
            if isinstance(reason, StartFailed):
                return reason
        return error

    async def _await_death(self) -> str:
        actors = (self._actor, *self._others)
        deaths = [asyncio.ensure_future(_death_of(actor)) for actor in actors]
        await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        rank = next(rank for rank, death in enumerate(deaths) if death.done())
        self.kill()
        reasons = await asyncio.gather(*deaths)
        await self._certainly_gone(reasons)
        return reasons[rank] if not self._others else f"rank {rank} of {len(actors)}: {reasons[rank]}"

    async def _certainly_gone(self, reasons: Sequence[str]) -> None:
        """Return once no process of it can write anything; ``reasons``: Ray's, of each rank's end."""
        for one in self._identities:
            if one.is_here:
                await _ended(one)
        elsewhere = not all(one.is_here for one in self._identities)
        if elsewhere and not self._stopped and not all(SEEN_TO_END in reason for reason in reasons):
            await asyncio.sleep(self._asked_at + self._gone_after_s - time.monotonic())

    async def _call(self, method: str, *arguments: object) -> Any:
        """Ask rank 0. The worker's death is an answer too: a call that was under way may never get another.

        Raises:
            ProcessDied, StartFailed: see ProcessHandle.
        """
        calling = asyncio.ensure_future(self._call_on(self._actor, method, *arguments))
        try:
            await asyncio.wait({calling, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise ProcessDied(self._death.result())
            return calling.result()
        finally:
            calling.cancel()

    async def _call_on(self, actor: Any, method: str, *arguments: object) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(actor, method).remote(*arguments)
        except RayActorError as error:
            raise ProcessDied(" ".join(str(error).split())[:300]) from error
        except RayTaskError as error:
            # What the code in the process raised. An error made for users is final; others are defects.
            if isinstance(error.cause, RankLostError):
                raise ProcessDied(str(error.cause)) from error
            if isinstance(error.cause, AntiphonError):
                raise StartFailed(str(error.cause)) from error
            raise ProcessDied(f"{method} failed: {error}") from error


async def _ended(process: ProcessIdentity) -> None:
    """End a process of this machine."""
    process.kill()
    while True:
        if not process.lives:
            return
        await asyncio.sleep(GONE_POLL_S)


async def _death_of(actor: Any) -> str:
    from ray.exceptions import RayActorError

    try:
        await actor.wait_for_ever.remote()
    except RayActorError as error:
        return " ".join(str(error).split())[:300]
    return "its actor returned from a call that never returns"


def _note_outcome(following: asyncio.Future[None]) -> None:
    """A rank's end is rank 0's to notice; here it only must not count as an error nobody looked at."""
    if not following.cancelled():
        following.exception()
