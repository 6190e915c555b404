"""A comparison that is run on servers: what is measured, in which order, and what a failure leaves."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.ladder import Ladder
from antiphon.benchmarks.split.loads import FixedLoads
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import best_within, load_runs
from antiphon.benchmarks.split.run import DRAIN_S, ComparisonIncomplete, HttpLoad, run_comparison
from antiphon.protocol.errors import AntiphonError


async def test_servers_are_measured_by_http_and_only_what_is_missing(script: Any, tmp_path: Path) -> None:
    fast, slow = await script(first_s=0.01, gap_s=0.002), await script(first_s=0.01, gap_s=3.0)
    started: list[str] = []

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        started.append(arrangement.name)
        assert arrangement.url is not None
        yield arrangement.url

    ladder = Ladder(10.0, 2.0, 20.0, 1.2, 0.2, 60_000.0, 2500.0, 0.9, refine=0)
    load, mix = HttpLoad(FixedLoads(ladder, {}).ladders, "CPU", "m"), Mix("tiny", 5, 2)
    arrangements = [Arrangement("quick", 2, url=fast.url), Arrangement("slow", 2, url=slow.url)]
    lines: list[tuple[str, float, bool]] = []

    async def compare() -> None:
        lines.clear()
        await run_comparison(
            arrangements,
            [mix],
            load,
            tmp_path / "split.json",
            again=False,
            on_run=lambda run, known: lines.append((run.arrangement, run.rate_per_s, known)),
            start=start,
        )

    await compare()
    assert [line for line in lines if line[0] == "quick"] == [("quick", 10.0, False), ("quick", 20.0, False)]
    assert ("slow", 10.0, False) in lines
    runs = load_runs(tmp_path / "split.json")
    assert all(each.peer and each.requests and not each.failed for each in runs)
    quick = best_within([each for each in runs if each.arrangement == "quick"], 60_000.0, 2500.0, 0.9)
    assert quick is not None
    assert quick.run.rate_per_s == 20.0
    assert all(each.share(60_000.0, 2500.0) == 0 for each in runs if each.arrangement == "slow")
    first = list(started)
    await compare()
    assert started == first
    assert all(known for _, _, known in lines)


async def test_one_that_does_not_start_and_too_little_time_leave_the_others_their_runs(
    script: Any, tmp_path: Path
) -> None:
    fast = await script(first_s=0.01, gap_s=0.002)
    started: list[str] = []

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        started.append(arrangement.name)
        if arrangement.url is None:
            raise AntiphonError(f"{arrangement.name} does not start")
        yield arrangement.url

    ladder = Ladder(10.0, 2.0, 20.0, 1.0, 0.2, 60_000.0, 60_000.0, 0.9, refine=0)
    load, output = HttpLoad(FixedLoads(ladder, {}).ladders, "CPU", "m"), tmp_path / "split.json"

    async def compare(limit_s: float) -> None:
        await run_comparison(
            [Arrangement("broken", 2), Arrangement("quick", 2, url=fast.url)],
            [Mix("tiny", 5, 4)],
            load,
            output,
            again=False,
            on_run=lambda run, known: None,
            start=start,
            limit_s=limit_s,
        )

    with pytest.raises(ComparisonIncomplete, match=r"broken, tiny: no time.*quick, tiny: no time"):
        await compare(DRAIN_S)
    assert not started
    with pytest.raises(ComparisonIncomplete, match="broken does not start"):
        await compare(math.inf)
    assert [run.rate_per_s for run in load_runs(output)] == [10.0, 20.0]


async def test_mixes_take_turns(script: Any, tmp_path: Path) -> None:
    fast = await script(first_s=0.01, gap_s=0.002)
    ladder = Ladder(10.0, 2.0, 40.0, 1.0, 0.4, 60_000.0, 60_000.0, 0.9, refine=0)
    standing: list[tuple[str, float]] = []

    def stands(arrangement: Arrangement, mix: Mix, rate: float) -> int:
        standing.append((mix.name, rate))
        return 3

    load = HttpLoad(FixedLoads(ladder, {}).ladders, "CPU", "m", 0, 60.0, stands)
    mixes, output = [Mix("a", 5, 4), Mix("b", 6, 4)], tmp_path / "split.json"

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        assert arrangement.url is not None
        yield arrangement.url

    await run_comparison(
        [Arrangement("one", 2, url=fast.url)],
        mixes,
        load,
        output,
        again=False,
        on_run=lambda run, known: None,
        start=start,
    )
    assert standing == [(name, rate) for rate in (10.0, 20.0, 40.0) for name in ("a", "b")]
    runs = load_runs(output)
    assert all(each.standing == 3 and each.requests for each in runs)
