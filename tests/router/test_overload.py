"""Three times what fits: what is taken is served as quickly as before, and the rest is told so at once."""

from __future__ import annotations

import asyncio
import statistics

import httpx

from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway

SLOTS = 6
STEPS_S = 0.08
SECONDS = 8.0
SETTLE_S = 2.0
"""Beginning of each stretch that is not counted: nobody can be answered yet."""

Outcome = tuple[float, int, float, bool]
"""(when it ended, status, seconds, whether Retry-After was there)."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def ask(deployment, outcomes: list[Outcome]) -> None:
    began = now()
    response = await deployment.chat()
    ended = now()
    outcomes.append((ended, response.status_code, ended - began, "retry-after" in response.headers))


def answered_per_s(outcomes: list[Outcome], began: float) -> float:
    ended = [at for at, status, _, _ in outcomes if status == httpx.codes.OK]
    return sum(began + SETTLE_S <= at <= began + SECONDS for at in ended) / (SECONDS - SETTLE_S)


async def closed_loop(deployment, clients: int) -> tuple[float, list[Outcome]]:
    """Answers a second of clients that ask again as soon as they were answered."""
    outcomes: list[Outcome] = []
    began = now()

    async def again() -> None:
        while now() < began + SECONDS:
            await ask(deployment, outcomes)

    await asyncio.gather(*(again() for _ in range(clients)))
    return answered_per_s(outcomes, began), outcomes


async def test_overload_costs_no_goodput_and_is_refused_at_once(deploy):
    # The workers' time is slept, not computed, and nobody waits for it; all times are the loop's own, so that
    # nothing depends on who else uses the machine.
    asyncio.get_running_loop().skip_waits()
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "alleluia")))
    workers.step_s = STEPS_S
    deployment = await deploy(workers, max_in_flight_requests=SLOTS, max_queued_requests=2)
    peak_per_s, calm = await closed_loop(deployment, SLOTS)
    assert {status for _, status, _, _ in calm} == {httpx.codes.OK}

    outcomes: list[Outcome] = []
    tasks = []
    began = now()
    while (due := began + len(tasks) / (3 * peak_per_s)) < began + SECONDS:
        await asyncio.sleep(max(due - now(), 0.0))
        tasks.append(asyncio.create_task(ask(deployment, outcomes)))
    await asyncio.gather(*tasks)
    goodput_per_s = answered_per_s(outcomes, began)

    assert {status for _, status, _, _ in outcomes} == {httpx.codes.OK, httpx.codes.TOO_MANY_REQUESTS}
    assert all(retry_after for _, status, _, retry_after in outcomes if status != httpx.codes.OK)
    assert goodput_per_s >= 0.9 * peak_per_s
    refused = sorted(seconds for _, status, seconds, _ in outcomes if status != httpx.codes.OK)
    served = [seconds for _, status, seconds, _ in outcomes if status == httpx.codes.OK]
    assert len(refused) > len(served)
    # Generous: a slow machine takes its time to say anything.
    assert refused[int(0.95 * len(refused))] < 0.5
    assert statistics.median(served) < 3 * statistics.median(seconds for _, _, seconds, _ in calm)
    assert await deployment.metric("refusal_seconds_count") == len(refused)
