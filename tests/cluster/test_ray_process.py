"""One worker as several actors: who may say why it did not start, and when it counts as dead."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from antiphon.cluster.process import ProcessDied, StartFailed
from antiphon.cluster.process_identity import ProcessIdentity
from antiphon.cluster.ray_process import RayProcess
from antiphon.protocol.errors import CheckpointError, RankLostError
from antiphon.protocol.identity import Role, Topology, WorkerAddress

NOBODY = Topology(0, ())
ADDRESS = WorkerAddress("decode-0", Role.DECODE, 1, "tcp://127.0.0.1:1")


SOMEWHERE = ProcessIdentity("another machine", 1, 1)


class Gone(Exception):
    """Ray's error of an actor that died."""


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Actor:
    """Answers calls as told; lives until killed."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"identity": SOMEWHERE, **answers}
        self.dead = asyncio.Event()
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        class Call:
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                self.called.append((method, *arguments))
                if method == "wait_for_ever":
                    await self.dead.wait()
                    raise Gone("the process is gone")
                answer = self.answers.get(method)
                if isinstance(answer, Exception):
                    raise TaskError(answer)
                if answer == "never":
                    await asyncio.Event().wait()
                return answer

        return Call


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    module, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    module.kill = lambda actor, no_restart: actor.dead.set()  # type: ignore[attr-defined]
    errors.RayActorError, errors.RayTaskError = Gone, TaskError  # type: ignore[attr-defined]
    module.exceptions = errors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)


async def test_ranks_meet_at_rank_0_and_see_the_gpus_of_all() -> None:
    first = Actor(gpu="3", open_ranks=41, start=ADDRESS)
    others = [Actor(gpu="0", follow="never"), Actor(gpu="7", follow="never")]
    started: list[WorkerAddress] = []
    process = RayProcess(first, others, started.append, shares_gpus=True)
    assert await process.start(NOBODY) == ADDRESS
    assert started == [ADDRESS]
    for actor in (first, *others):
        assert ("see_gpus", ["3", "0", "7"]) in actor.called
    assert ("open_ranks", 3) in first.called
    assert all(("follow", 41) in other.called for other in others)
    process.kill()
    await process.wait_dead()


async def test_a_rank_that_cannot_start_is_the_reason_at_once() -> None:
    first = Actor(open_ranks=41, start="never")
    broken = Actor(follow=CheckpointError("model.safetensors: truncated"))
    process = RayProcess(first, [broken], lambda address: None)
    with pytest.raises(StartFailed, match=r"^model\.safetensors: truncated$"):
        await asyncio.wait_for(process.start(NOBODY), 60)
    process.kill()
    await process.wait_dead()


async def test_the_rank_that_knows_why_is_heard_before_the_one_that_lost_it() -> None:
    first = Actor(open_ranks=41, start=RankLostError("a rank was lost"))
    broken = Actor(follow=CheckpointError("no such file"))
    with pytest.raises(StartFailed, match="no such file"):
        await RayProcess(first, [broken], lambda address: None).start(NOBODY)
    lost = Actor(follow=RankLostError("rank 0 is gone"))
    with pytest.raises(ProcessDied, match="rank"):  # tried again: nothing is wrong with the configuration
        await RayProcess(first, [lost], lambda address: None).start(NOBODY)


async def test_one_dead_rank_ends_all_and_the_worker_is_dead_when_none_is_left() -> None:
    first, second, third = Actor(), Actor(), Actor()
    process = RayProcess(first, [second, third], lambda address: None)
    await asyncio.sleep(0)
    second.dead.set()
    assert await asyncio.wait_for(process.wait_dead(), 60) == "rank 1 of 3: the process is gone"
    assert first.dead.is_set()
    assert third.dead.is_set()


@pytest.mark.parametrize("method", ["status", "set_topology", "drain", "stop"])
async def test_a_call_under_way_ends_with_the_process(method: str) -> None:
    first = Actor(**{method: "never"})
    process = RayProcess(first, [], lambda address: None)
    arguments = {"set_topology": (NOBODY,), "drain": (60.0,)}.get(method, ())
    calling = asyncio.ensure_future(getattr(process, method)(*arguments))
    await asyncio.sleep(0)
    assert not calling.done()
    first.dead.set()
    with pytest.raises(ProcessDied, match="the process is gone"):
        await asyncio.wait_for(calling, 60)
