"""Puts a rising load on each arrangement until it breaks, and keeps every run as soon as it is there."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.benchmarks.serve.command import Options, measure
from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.host import start_server
from antiphon.benchmarks.split.identity import COMMON, differences, serving_settings
from antiphon.benchmarks.split.ladder import Ladder, RateSearch
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import LoadRun, Point, append_run, load_runs, observed
from antiphon.protocol.errors import AntiphonError

WARM_REQUESTS = 8
WARM_TOKENS = 64
"""Answers need not be long for everything to be loaded."""
WARM_RATE_PER_S = 4.0
DRAIN_S = 30.0
SHOWN = 6
"""Differences that are named of one run."""


class ComparisonIncomplete(AntiphonError):
    """An arrangement could not be measured, or the time was over; the others' runs are kept."""


class MeasuredOtherwise(AntiphonError):
    """The file holds runs that others are not to be compared with."""


Server = Callable[[Arrangement], AbstractAsyncContextManager[str]]
"""Starts an arrangement; yields its base URL."""
Measure = Callable[[str, Arrangement, Mix, float], Awaitable[LoadRun]]
"""(url, arrangement, mix, requests per second) -> what it gave."""
OnRun = Callable[[LoadRun, bool], None]
"""Called with (run, whether it was known before)."""


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Measures with the project's load generator: Poisson arrivals, as many as on average, prompts of exact
    length, TTFT from the intended time."""

    ladders_of: Callable[[Arrangement, Mix], Sequence[Ladder]]
    """One for each limit of ITL that the arrangement is measured under, all of the same duration; none where
    it is not measured."""
    device: str
    model: str
    """Name under which the runs are kept; a server may call its model otherwise."""
    seed: int = 0
    drain_s: float = DRAIN_S
    """Answers that take longer than this after the last request was sent are failures."""
    standing_of: Callable[[Arrangement, Mix, float], int] = lambda arrangement, mix, rate: 0
    """Requests in service with which a load begins; see ``serve.workload.standing``."""

    async def __call__(self, url: str, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> LoadRun:
        """See ``Measure``."""
        ladder = self.ladders_of(arrangement, mix)[0]
        standing = self.standing_of(arrangement, mix, rate_per_s)
        options = Options(
            url=url,
            rate_per_s=rate_per_s,
            duration_s=ladder.duration_s,
            warmup_s=ladder.warmup_s,
            exact_counts=True,
            standing=standing,
            input_tokens=str(mix.input_tokens),
            output_tokens=str(mix.output_tokens),
            drain_s=self.drain_s,
            seed=self.seed,
        )
        run, document = await measure(options)
        what = Point(arrangement, self.model, self.device, mix, rate_per_s, ladder.duration_s, standing)
        settings = self.settings(arrangement, mix)
        return observed(replace(what, settings=settings), run.measured(), document)

    def settings(self, arrangement: Arrangement, mix: Mix) -> dict[str, object]:
        """What a run of these keeps of how it was measured, and on what."""
        ladder = self.ladders_of(arrangement, mix)[0]
        mine: dict[str, object] = {
            "warmup_s": ladder.warmup_s,
            "drain_s": self.drain_s,
            "seed": self.seed,
        }
        return mine | serving_settings(arrangement)

    def differences(self, run: LoadRun, arrangement: Arrangement, mix: Mix) -> list[str]:
        """What differs between a run and one that would be measured now at its rate, on this arrangement.

        Of a run of another arrangement only what all of a comparison have in common.
        """
        wanted = self.settings(arrangement, mix) | {
            "input_tokens": mix.input_tokens,
            "output_tokens": mix.output_tokens,
            "duration_s": self.ladders_of(arrangement, mix)[0].duration_s,
        }
        known = run.whole_settings
        if self.is_of(run, arrangement):
            standing = self.standing_of(arrangement, mix, run.rate_per_s)
            return differences(known, wanted | {"standing": standing})
        common = COMMON & known.keys() & wanted.keys()
        return differences({name: known[name] for name in common}, {name: wanted[name] for name in common})

    def is_of(self, run: LoadRun, arrangement: Arrangement) -> bool:
        """Whether a run is this arrangement's."""
        same = (arrangement.name, arrangement.chunk_tokens) == (run.arrangement, run.chunk_tokens)
        return same and self.is_beside(run, arrangement)

    def is_beside(self, run: LoadRun, arrangement: Arrangement) -> bool:
        """Whether a run may be compared with this arrangement's."""
        return (run.device, run.gpus, run.model) == (self.device, arrangement.gpus, self.model)

    async def warm(self, url: str, mix: Mix) -> None:
        """A few requests, so that nothing is computed or loaded for the first time in a measured run."""
        options = Options(
            url=url,
            rate_per_s=WARM_RATE_PER_S,
            duration_s=WARM_REQUESTS / WARM_RATE_PER_S,
            input_tokens=str(mix.input_tokens),
            output_tokens=str(min(mix.output_tokens, WARM_TOKENS)),
            drain_s=DRAIN_S,
            seed=self.seed,
        )
        await measure(options)

    def takes_s(self, arrangement: Arrangement, mix: Mix) -> float:
        """Longest time of one load."""
        return self.ladders_of(arrangement, mix)[0].duration_s + self.drain_s


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
    leaves the others their turn. No load is begun that would not end within ``limit_s`` of the start, and
    each arrangement has an equal part of what is left of that.

    Args:
        again: measure what is held once more; what is measured of an arrangement and mix then replaces all
            that was.

    Raises:
        MeasuredOtherwise: ``output`` holds runs with other settings; names them, and nothing is begun.
        ComparisonIncomplete: an arrangement failed, or the time is over; what was measured is kept.
    """
    _refuse_others(arrangements, mixes, load, output, again=again)
    end = time.monotonic() + limit_s
    failed: list[str] = []
    for index, arrangement in enumerate(arrangements):
        begin = time.monotonic()
        turn = begin + (end - begin) / (len(arrangements) - index)
        try:
            await _measure(
                arrangement, mixes, load, output, again=again, on_run=on_run, start=start, end=turn
            )
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
    """Every mix on one arrangement, a load of each in turn, so that all have some when the time is over."""
    known = [] if again else [run for run in load_runs(output) if load.is_of(run, arrangement)]
    searches: dict[Mix, list[RateSearch]] = {}
    for mix in mixes:
        ladders = load.ladders_of(arrangement, mix)
        if not ladders:
            continue
        mine = [run for run in known if run.mix == mix.name]
        searches[mix] = [RateSearch(ladder, mine) for ladder in ladders]
        for run in mine:
            on_run(run, True)
    anew = set(searches) if again else set()
    left = {mix for mix, each in searches.items() if _next_rate(each) is not None}
    if not left:
        return

    def in_time(mix: Mix) -> None:
        if time.monotonic() + load.takes_s(arrangement, mix) > end:
            raise ComparisonIncomplete(
                f"{arrangement.label}, {mix.name}: no time is left; the next run goes on"
            )

    in_time(next(mix for mix in mixes if mix in left))
    async with start(arrangement) as url:
        for mix in left:
            await load.warm(url, mix)
        while left:
            for mix in [mix for mix in mixes if mix in left]:
                rate = _next_rate(searches[mix])
                if rate is None:
                    left.remove(mix)
                    continue
                in_time(mix)
                run = await load(url, arrangement, mix, rate)
                append_run(output, run, anew=mix in anew)
                anew.discard(mix)
                for search in searches[mix]:
                    search.add(run)
                on_run(run, False)


def _next_rate(searches: Sequence[RateSearch]) -> float | None:
    """Of the first limit whose search is not over; a load says something about every limit."""
    return next((rate for search in searches if (rate := search.next_rate()) is not None), None)


def device_name(uses_gpu: bool) -> str:
    """The GPU's name, asked by a process of its own so that this one holds no memory of it; else CPU."""
    if not uses_gpu:
        return "CPU"
    ask = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AntiphonError("a deployment on GPUs was asked for, and there is none here")
    return done.stdout.strip().splitlines()[-1]


def differences_now(
    run: LoadRun,
    arrangements: Sequence[Arrangement],
    mixes: Sequence[Mix],
    load: HttpLoad,
    *,
    again: bool = False,
) -> list[str]:
    """What of a run is not as it would be measured now; nothing of one that stands beside none of these.

    Args:
        again: runs of these arrangements are measured once more, whatever they are.
    """
    mix = next((each for each in mixes if each.name == run.mix), None)
    if mix is None:
        return []
    beside = [each for each in arrangements if load.ladders_of(each, mix) and load.is_beside(run, each)]
    mine = [each for each in beside if load.is_of(run, each)]
    if not beside or (mine and again):
        return []
    return load.differences(run, (mine or beside)[0], mix)


def _refuse_others(
    arrangements: Sequence[Arrangement], mixes: Sequence[Mix], load: HttpLoad, output: Path, *, again: bool
) -> None:
    """Runs that were measured otherwise would be compared as if they were not."""
    found: dict[tuple[object, ...], str] = {}
    for run in load_runs(output):
        if run.place in found:
            continue
        if other := differences_now(run, arrangements, mixes, load, again=again):
            chunk = "" if run.chunk_tokens is None else f", chunk {run.chunk_tokens}"
            what = f"{run.mix} on {run.arrangement}{chunk} at {run.rate_per_s:g}/s"
            found[run.place] = f"{what}: {', '.join(other[:SHOWN])}"
    if found:
        raise MeasuredOtherwise(
            f"{output} holds runs that were measured otherwise: {'; '.join(found.values())}. "
            f"Name another file, or measure all of them again"
        )
