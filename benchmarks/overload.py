"""More load than a deployment can carry: what it still gets done, and how quickly it refuses the rest.

    python -m antiphon.benchmarks.overload [--config FILE] [--seconds S] [--output FILE]

The peak is what a closed loop of clients gets done. Then requests arrive at multiples of it, whatever comes
of them. An answer is good when it was whole within the objective; goodput counts those that ended while a
point lasts, without its first seconds. Refusals are timed twice: by the client, and inside the
router (``antiphon_refusal_seconds``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from antiphon.benchmarks.local_deployment import machine, prompt
from antiphon.cluster.cli_serve import DEFAULT_CONFIG, read_config
from antiphon.cluster.deployment import deploy
from antiphon.cluster.resolution import resolve_deployment

CLIENTS = 16
"""Of the closed loop."""
FACTORS = (0.5, 1.0, 2.0, 3.0)
OUTPUT_TOKENS = 24
ROUTER = {"max_in_flight_requests": 16, "max_queued_requests": 16}
"""Bounds of the router: what it admits, and what may wait, at one time."""
DRAIN_S = 60.0
SETTLE_S = 4.0
"""Beginning of each point that is left out of its goodput."""
BUCKET = re.compile(r'^antiphon_refusal_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ended:
    """One request; ``refused`` says that it was told to come again later."""

    seconds: float
    ended_at: float
    status: int
    refused: bool


@dataclass(frozen=True, slots=True)
class Point:
    """What came of the requests that arrived in one stretch of time."""

    offered_per_s: float
    seconds: float
    arrived: int
    answered: int
    refused: int
    other: int
    """Neither: errors, and what had not ended when patience did."""
    goodput_per_s: float
    answered_p50_s: float | None
    answered_p95_s: float | None
    refused_p95_s: float | None
    """As the client sees it."""
    router_refused_p95_s: float | None
    """Upper bound of the histogram's bucket."""


async def measure(config_file: Path, seconds: float, objective_s: float) -> dict[str, object]:
    """Start the deployment, load it, stop it."""
    config = read_config(None, config_file, 0)
    config = config.model_copy(update={"router": config.router.model_copy(update=ROUTER)})
    async with deploy(resolve_deployment(config)) as deployment:
        await deployment.wait_ready()
        limits = httpx.Limits(max_connections=2048, max_keepalive_connections=256)
        async with httpx.AsyncClient(
            base_url=deployment.urls[0], timeout=120.0, limits=limits, trust_env=False
        ) as client:
            load = Load(client, config.model.name, objective_s)
            await load.closed_loop(2 * SETTLE_S)
            peak = await load.closed_loop(seconds)
            points = [await load.open_loop(peak.goodput_per_s * factor, seconds) for factor in FACTORS]
    return {
        "objective_s": objective_s,
        "router": ROUTER,
        "output_tokens": OUTPUT_TOKENS,
        "peak": asdict(peak),
        "points": [
            {"factor": factor, "of_peak": point.goodput_per_s / peak.goodput_per_s, **asdict(point)}
            for factor, point in zip(FACTORS, points, strict=True)
        ],
    }


class Load:
    """Sends requests and counts what comes of them."""

    def __init__(self, client: httpx.AsyncClient, model: str, objective_s: float) -> None:
        self._client = client
        self._model = model
        self._objective_s = objective_s
        self._sent = 0

    async def closed_loop(self, seconds: float) -> Point:
        """Clients that ask again as soon as they were answered."""
        ended: list[Ended] = []
        until = time.monotonic() + seconds

        async def ask_again() -> None:
            while time.monotonic() < until:
                ended.append(await self._one())

        began = time.monotonic()
        await asyncio.gather(*(ask_again() for _ in range(CLIENTS)))
        rate_per_s = len(ended) / (time.monotonic() - began)
        return self._point(rate_per_s, (began, until), ended, 0, None)

    async def open_loop(self, rate_per_s: float, seconds: float) -> Point:
        """Requests at even distances, whatever comes of the ones before."""
        before = await self._refusals()
        began = time.monotonic()
        tasks: list[asyncio.Task[Ended]] = []
        while (due := began + len(tasks) / rate_per_s) < began + seconds:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            tasks.append(asyncio.create_task(self._one()))
        done, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in late:
            task.cancel()
        after = await self._refusals()
        ended = [task.result() for task in done]
        return self._point(rate_per_s, (began, began + seconds), ended, len(late), _p95_of(before, after))

    async def _one(self) -> Ended:
        self._sent += 1
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt(self._sent)}],
            "max_completion_tokens": OUTPUT_TOKENS,
            "temperature": 0,
        }
        began = time.monotonic()
        response = await self._client.post("/v1/chat/completions", json=body)
        refused = response.status_code in (429, 503) and "retry-after" in response.headers
        now = time.monotonic()
        return Ended(now - began, now, response.status_code, refused)

    def _point(
        self,
        rate_per_s: float,
        span: tuple[float, float],
        ended: Sequence[Ended],
        late: int,
        router_p95_s: float | None,
    ) -> Point:
        answered = [e.seconds for e in ended if e.status == httpx.codes.OK]
        refused = [e.seconds for e in ended if e.refused]
        first, last = span[0] + SETTLE_S, span[1]
        good = sum(
            e.status == httpx.codes.OK and e.seconds <= self._objective_s and first <= e.ended_at <= last
            for e in ended
        )
        return Point(
            offered_per_s=rate_per_s,
            seconds=span[1] - span[0],
            arrived=len(ended) + late,
            answered=len(answered),
            refused=len(refused),
            other=len(ended) - len(answered) - len(refused) + late,
            goodput_per_s=good / (last - first),
            answered_p50_s=_percentile(answered, 50),
            answered_p95_s=_percentile(answered, 95),
            refused_p95_s=_percentile(refused, 95),
            router_refused_p95_s=router_p95_s,
        )

    async def _refusals(self) -> dict[float, float]:
        """Upper bound of each bucket -> refusals that took no longer, since the start."""
        text = (await self._client.get("/metrics")).text
        return {float(bound): float(count) for bound, count in BUCKET.findall(text)}


def _p95_of(before: dict[float, float], after: dict[float, float]) -> float | None:
    """The 95th percentile of what came between two readings of a histogram; None when nothing did."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(counts.values(), default=0.0)
    return next((bound for bound, count in counts.items() if total and count >= 0.95 * total), None)


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each point")
    parser.add_argument(
        "--objective", type=float, default=10.0, help="seconds within which an answer is good"
    )
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.config, options.seconds, options.objective))
    document = {"machine": machine(), **figures}
    text = json.dumps(document, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
