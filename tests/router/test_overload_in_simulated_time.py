"""Goodput behind the door from half to three times what fits, in simulated time: the same on every machine.

The workers are a prefill worker that takes prompts one by one and a decode worker whose steps take longer the
more requests they hold. Time passes only when everybody waits, so minutes of load are over in a moment.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from antiphon.router import admission as admission_module
from antiphon.router.admission import Admission, DeadlineTooClose, QueueFull
from antiphon.router.metrics import RouterMetrics

SLOTS, QUEUE = 16, 16
PREFILL_S, OUTPUT_TOKENS = 0.1, 24
OBJECTIVE_S = 15.0
SECONDS, SETTLE_S = 60.0, 12.0
"""Length of a stretch of load, and its beginning that is not counted."""


class _PassingTime(selectors.SelectSelector):
    """Instead of waiting, time moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passing = _PassingTime()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.now


def simulate(work: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = SimulatedLoop()

    class Clock:
        monotonic = staticmethod(loop.time)

    monkeypatch.setattr(admission_module, "time", Clock)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Deployment:
    """One router's door and a pair of workers behind it."""

    def __init__(self) -> None:
        self.door = Admission(SLOTS, QUEUE, RouterMetrics("tiny"))
        self._prefill = asyncio.Lock()
        self._decoding = 0
        self.answered: list[tuple[float, float]] = []
        """(when, seconds)."""
        self.refused = 0

    async def ask(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with self.door.slots(1, 0, 600.0):
                async with self._prefill:
                    await asyncio.sleep(PREFILL_S)
                self._decoding += 1
                for _ in range(OUTPUT_TOKENS):
                    await asyncio.sleep(0.02 + 0.004 * self._decoding)
                self._decoding -= 1
        except (QueueFull, DeadlineTooClose):
            self.refused += 1
        else:
            self.answered.append((loop.time(), loop.time() - began))

    def goodput_per_s(self) -> float:
        good = sum(SETTLE_S <= at <= SECONDS and took <= OBJECTIVE_S for at, took in self.answered)
        return good / (SECONDS - SETTLE_S)


async def closed_loop() -> float:
    deployment = Deployment()
    loop = asyncio.get_running_loop()

    async def again() -> None:
        while loop.time() < SECONDS:
            await deployment.ask()

    await asyncio.gather(*(again() for _ in range(SLOTS)))
    return deployment.goodput_per_s()


async def open_loop(rate_per_s: float, gap: Callable[[], float]) -> tuple[float, Deployment]:
    """Requests come whatever becomes of those before; ``gap`` is 1 on average."""
    deployment = Deployment()
    loop = asyncio.get_running_loop()
    tasks, due = [], 0.0
    while due < SECONDS:
        await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.create_task(deployment.ask()))
        due += gap() / rate_per_s
    await asyncio.gather(*tasks)
    return deployment.goodput_per_s(), deployment


FACTORS = (0.5, 1.0, 1.25, 1.5, 2.0, 3.0)


@pytest.mark.parametrize("arrivals", ["even", "by chance"])
def test_goodput_does_not_dip_between_the_peak_and_three_times_the_peak(
    arrivals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak_per_s = simulate(closed_loop(), monkeypatch)
    assert peak_per_s > 5.0
    for factor in FACTORS:
        chance = random.Random(f"{factor}")
        gap = (lambda: 1.0) if arrivals == "even" else (lambda chance=chance: chance.expovariate(1.0))
        goodput_per_s, deployment = simulate(open_loop(factor * peak_per_s, gap), monkeypatch)
        of_peak = goodput_per_s / peak_per_s
        assert of_peak >= 0.9 * min(factor, 1.0), f"{factor}: {of_peak:.2f} of the peak"
        if factor >= 1.5:
            assert deployment.refused > 0
            assert max(took for _, took in deployment.answered) <= OBJECTIVE_S
        assert (deployment.door.in_flight, deployment.door.queued) == (0, 0)
