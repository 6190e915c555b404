"""Puts a rising load on each arrangement until it breaks, and keeps every run as soon as it is there."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from antiphon.benchmarks.serve.command import Options, measure
from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.host import start_server
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import LoadRun, Point, append_run, load_runs, observed
from antiphon.protocol.errors import AntiphonError

FARTHEST_DOWN = 4
"""Rungs below the first load that are tried when that is too much."""
FEWEST_REQUESTS = 5
"""Expected requests of a load's window below which it says nothing."""
WARM_REQUESTS = 8
WARM_RATE_PER_S = 4.0
DRAIN_S = 30.0


class ComparisonIncomplete(AntiphonError):
    """An arrangement could not be measured, or the time was over; the others' runs are kept."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Which loads an arrangement is given, and when it counts as broken."""

    first_per_s: float
    step: float
    """Each load is so many times the one before."""
    highest_per_s: float
    duration_s: float
    warmup_s: float
    ttft_ms: float
    loosest_itl_ms: float
    attainment: float
    """Share of requests that must keep the limits; below it at the loosest limit, no higher load is tried."""
    refine: int = 1
    """Loads tried between the last that held and the first that did not."""

    def __post_init__(self) -> None:
        if self.first_per_s <= 0 or self.step <= 1 or self.highest_per_s < self.first_per_s:
            raise AntiphonError("rates rise from a positive one by a factor above 1 to a highest one")
        if not 0 <= self.warmup_s < self.duration_s or not 0 < self.attainment <= 1 or self.refine < 0:
            raise AntiphonError("the warm-up ends within the duration, the attainment lies in (0, 1]")
        if not self.says_something(self.first_per_s):
            raise AntiphonError(
                f"{self.first_per_s:g} requests/s for {self.duration_s - self.warmup_s:g} s: at least "
                f"{FEWEST_REQUESTS} requests are needed"
            )

    def says_something(self, rate_per_s: float) -> bool:
        """Whether enough requests of such a load fall into its window."""
        return rate_per_s * (self.duration_s - self.warmup_s) >= FEWEST_REQUESTS

    def holds(self, run: LoadRun) -> bool:
        """Whether the arrangement kept up with this load."""
        return run.share(self.ttft_ms, self.loosest_itl_ms) >= self.attainment


Server = Callable[[Arrangement], AbstractAsyncContextManager[str]]
"""Starts an arrangement; yields its base URL."""
Measure = Callable[[str, Arrangement, Mix, float], Awaitable[LoadRun]]
"""(url, arrangement, mix, requests per second) -> what it gave."""
OnRun = Callable[[LoadRun, bool], None]
"""Called with (run, whether it was known before)."""


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Measures with the project's load generator: Poisson arrivals, prompts of exact length, TTFT from the
    intended time."""

    ladder: Ladder
    device: str
    model: str
    """Name under which the runs are kept; a server may call its model otherwise."""
    seed: int = 0

    async def __call__(self, url: str, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> LoadRun:
        """See ``Measure``."""
        ladder = self.ladder
        options = self._options(url, mix, rate_per_s, ladder.duration_s, ladder.warmup_s)
        run, document = await measure(options)
        what = Point(arrangement, self.model, self.device, mix, rate_per_s, ladder.duration_s)
        return observed(what, run.measured(), document)

    async def warm(self, url: str, mix: Mix) -> None:
        """A few requests, so that nothing is computed or loaded for the first time in a measured run."""
        await measure(self._options(url, mix, WARM_RATE_PER_S, WARM_REQUESTS / WARM_RATE_PER_S, 0.0))

    def _options(self, url: str, mix: Mix, rate_per_s: float, duration_s: float, warmup_s: float) -> Options:
        return Options(
            url=url,
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            warmup_s=warmup_s,
            input_tokens=str(mix.input_tokens),
            output_tokens=str(mix.output_tokens),
            drain_s=DRAIN_S,
            seed=self.seed,
        )


async def run_comparison(
    arrangements: Sequence[Arrangement],
    mixes: Sequence[Mix],
    load: HttpLoad,
    output: Path,
    *,
    again: bool,
    on_run: OnRun,
    start: Server = start_server,
    limit_s: float = math.inf,
) -> None:
    """Measure every mix on every arrangement; what ``output`` holds is not measured again.

    An arrangement is started only when something of it is missing. One that cannot be started or measured
    leaves the others their turn. No load is begun that would not end within ``limit_s`` of the start.

    Raises:
        ComparisonIncomplete: an arrangement failed, or the time is over; what was measured is kept.
    """
    end = time.monotonic() + limit_s
    failed: list[str] = []
    for arrangement in arrangements:
        try:
            await _measure(arrangement, mixes, load, output, again=again, on_run=on_run, start=start, end=end)
        except AntiphonError as error:
            failed.append(str(error))
    if failed:
        raise ComparisonIncomplete("; ".join(failed))


async def _measure(
    arrangement: Arrangement,
    mixes: Sequence[Mix],
    load: HttpLoad,
    output: Path,
    *,
    again: bool,
    on_run: OnRun,
    start: Server,
    end: float,
) -> None:
    """Every mix on one arrangement."""
    known = [] if again else [run for run in load_runs(output) if _is_of(run, arrangement, load)]
    steps = {mix: RateSearch(load.ladder, [run for run in known if _is_mix(run, mix)]) for mix in mixes}
    for search in steps.values():
        for run in search.known:
            on_run(run, True)
    if all(search.next_rate() is None for search in steps.values()):
        return

    def in_time(mix: Mix) -> None:
        if time.monotonic() + load.ladder.duration_s + DRAIN_S > end:
            raise ComparisonIncomplete(
                f"{arrangement.label}, {mix.name}: no time is left; the next run goes on"
            )

    in_time(mixes[0])
    async with start(arrangement) as url:
        for mix, search in steps.items():
            if search.next_rate() is not None:
                in_time(mix)
                await load.warm(url, mix)
            while (rate := search.next_rate()) is not None:
                in_time(mix)
                run = await load(url, arrangement, mix, rate)
                append_run(output, run)
                search.add(run)
                on_run(run, False)


class RateSearch:
    """The next load for one arrangement and mix: up the ladder until it breaks, then in between."""

    def __init__(self, ladder: Ladder, known: Sequence[LoadRun]) -> None:
        self._ladder = ladder
        self.known = list(known)

    def add(self, run: LoadRun) -> None:
        """A load was measured."""
        self.known.append(run)

    def next_rate(self) -> float | None:
        """Requests per second to try; None when the search is over."""
        ladder = self._ladder
        tried = {run.rate_per_s: ladder.holds(run) for run in self.known}
        rung = 0
        if not tried.get(self._rate(0), True):  # even the first load was too much: go down, but not for ever
            while not tried.get(self._rate(rung), True):
                rung -= 1
                if rung < -FARTHEST_DOWN or not ladder.says_something(self._rate(rung)):
                    return None
            if self._rate(rung) not in tried:
                return self._rate(rung)
            low, high = self._rate(rung), self._rate(rung + 1)
        else:
            while tried.get(self._rate(rung), False):
                rung += 1
            high = self._rate(rung)
            if high > ladder.highest_per_s:
                return None
            if high not in tried:
                return high
            low = self._rate(rung - 1)
        return self._between(low, high, tried)

    def _between(self, low: float, high: float, tried: dict[float, bool]) -> float | None:
        """The next load between one that held and one that did not; None when there were enough."""
        for _ in range(self._ladder.refine):
            middle = _rounded((low * high) ** 0.5)
            if middle not in tried:
                return middle
            low, high = (middle, high) if tried[middle] else (low, middle)
        return None

    def _rate(self, rung: int) -> float:
        return _rounded(self._ladder.first_per_s * self._ladder.step**rung)


def device_name(uses_gpu: bool) -> str:
    """The GPU's name, asked by a process of its own so that this one holds no memory of it; else CPU."""
    if not uses_gpu:
        return "CPU"
    ask = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AntiphonError("a deployment on GPUs was asked for, and there is none here")
    return done.stdout.strip().splitlines()[-1]


def _rounded(rate_per_s: float) -> float:
    """Three significant digits, so that a resumed run meets the same loads."""
    return float(f"{rate_per_s:.3g}")


def _is_of(run: LoadRun, arrangement: Arrangement, load: HttpLoad) -> bool:
    return (run.arrangement, run.chunk_tokens, run.device, run.gpus, run.duration_s) == (
        arrangement.name,
        arrangement.chunk_tokens,
        load.device,
        arrangement.gpus,
        load.ladder.duration_s,
    ) and run.model == load.model


def _is_mix(run: LoadRun, mix: Mix) -> bool:
    return (run.mix, run.input_tokens, run.output_tokens) == (mix.name, mix.input_tokens, mix.output_tokens)
