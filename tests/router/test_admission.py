"""The door: who waits, in which order, and who is turned away before anything is spent on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from antiphon.router import admission as admission_module
from antiphon.router.admission import Admission, AdmissionTimeout, DeadlineTooClose, QueueFull, ShuttingDown
from antiphon.router.metrics import RouterMetrics


@pytest.fixture(autouse=True)
def _time_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a slot is held does not depend on whether the machine lets this process run."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(admission_module, "time", clock)


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics("tiny")


def rejections(metrics: RouterMetrics, reason: str) -> float:
    labels = {"reason": reason, "model_name": "tiny"}
    return metrics.registry.get_sample_value("antiphon_rejections_total", labels) or 0.0


async def hold(admission: Admission, seconds: float, priority: int = 0, timeout_s: float = 60.0) -> float:
    """Hold one slot; when it was got."""
    async with admission.slots(1, priority, timeout_s):
        got = time.monotonic()
        await asyncio.sleep(seconds)
        return got


@asynccontextmanager
async def full(admission: Admission, slots: int) -> AsyncIterator[asyncio.Event]:
    """All slots taken until the event is set, or the block ends."""
    release = asyncio.Event()

    async def occupy() -> None:
        async with admission.slots(1, 0, 60.0):
            await release.wait()

    tasks = [asyncio.create_task(occupy()) for _ in range(slots)]
    await asyncio.sleep(0)
    try:
        yield release
    finally:
        release.set()
        await asyncio.gather(*tasks)


async def test_smaller_priorities_go_first_then_the_earlier(metrics: RouterMetrics) -> None:
    admission = Admission(1, 10, metrics)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        async with admission.slots(1, priority, 60.0):
            order.append(name)

    async with full(admission, 1):
        waiting = []
        for name, priority in (("late", 5), ("first", 0), ("urgent", -3), ("second", 0)):
            waiting.append(asyncio.create_task(wait(name, priority)))
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["urgent", "first", "second", "late"]


async def test_a_full_queue_refuses_and_a_more_urgent_request_takes_the_last_place(
    metrics: RouterMetrics,
) -> None:
    admission = Admission(1, 2, metrics)
    async with full(admission, 1):
        kept = asyncio.create_task(hold(admission, 0.0))
        displaced = asyncio.create_task(hold(admission, 0.0))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refusal:
            await hold(admission, 0.0)
        assert refusal.value.retry_after_s >= 1
        urgent = asyncio.create_task(hold(admission, 0.0, priority=-1))
        with pytest.raises(QueueFull):
            await displaced
        assert admission.queued == 2
    assert await urgent <= await kept
    assert (rejections(metrics, "queue_full"), rejections(metrics, "displaced")) == (1, 1)
    assert (admission.queued, admission.in_flight) == (0, 0)


async def test_two_urgent_requests_at_one_time_take_two_places(metrics: RouterMetrics) -> None:
    admission = Admission(1, 2, metrics)
    async with full(admission, 1):
        displaced = [asyncio.create_task(hold(admission, 0.0)) for _ in range(2)]
        await asyncio.sleep(0)
        urgent = [asyncio.create_task(hold(admission, 0.0, priority=-1)) for _ in range(2)]
        refused = await asyncio.gather(*displaced, return_exceptions=True)
        assert [type(each) for each in refused] == [QueueFull, QueueFull]
        assert admission.queued == 2
    await asyncio.gather(*urgent)
    assert (admission.queued, admission.in_flight) == (0, 0)


async def test_what_cannot_end_in_time_is_refused_at_the_door(metrics: RouterMetrics) -> None:
    admission = Admission(1, 100, metrics)
    for _ in range(20):
        await hold(admission, 0.02)
    async with full(admission, 1):
        waiting = [asyncio.create_task(hold(admission, 0.0)) for _ in range(50)]
        await asyncio.sleep(0)
        late = asyncio.create_task(hold(admission, 0.0, timeout_s=0.3))
        await asyncio.sleep(0)
        assert late.done()  # it has not waited at all
        with pytest.raises(DeadlineTooClose) as refusal:
            await late
        assert refusal.value.retry_after_s >= 1
        urgent = asyncio.create_task(hold(admission, 0.0, priority=-1, timeout_s=0.3))  # nobody is before it
        await asyncio.sleep(0)
        assert not urgent.done()
    await asyncio.gather(urgent, *waiting)
    assert rejections(metrics, "deadline") == 1


async def test_with_room_only_less_than_the_quickest_request_takes_is_too_little(
    metrics: RouterMetrics,
) -> None:
    admission = Admission(4, 4, metrics)
    admission.check(1, 0, 0.001)  # nothing is known yet
    await asyncio.gather(*(hold(admission, 0.05) for _ in range(4)))
    with pytest.raises(DeadlineTooClose):
        admission.check(1, 0, 0.01)
    admission.check(1, 0, 1.0)


async def test_waiting_ends_at_the_deadline_and_leaves_nothing(metrics: RouterMetrics) -> None:
    admission = Admission(1, 4, metrics)
    async with full(admission, 1):
        with pytest.raises(AdmissionTimeout):
            await hold(admission, 0.0, timeout_s=0.02)
        assert admission.queued == 0
    assert admission.in_flight == 0


async def test_closing_turns_away_who_waits_and_who_comes(metrics: RouterMetrics) -> None:
    admission = Admission(1, 4, metrics)
    async with full(admission, 1):
        waiting = asyncio.create_task(hold(admission, 0.0))
        await asyncio.sleep(0)
        admission.close()
        with pytest.raises(ShuttingDown):
            await waiting
        with pytest.raises(ShuttingDown):
            admission.check(1, 0, 60.0)
    await admission.wait_idle()


async def test_every_slot_comes_back_whoever_gives_up_when(metrics: RouterMetrics) -> None:
    admission = Admission(3, 8, metrics)
    tasks = [asyncio.create_task(hold(admission, 0.003, priority=i % 3 - 1)) for i in range(11)]
    await asyncio.sleep(0)
    for i, task in enumerate(tasks):
        await asyncio.sleep(0.001)
        if i % 3 == 0:
            task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, float | asyncio.CancelledError | QueueFull) for one in done)
    assert (admission.in_flight, admission.queued) == (0, 0)
