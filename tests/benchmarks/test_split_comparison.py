"""The comparison of split and colocated: arrangements, the search for the highest load, goodput, verdicts."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.records import RecordError
from antiphon.benchmarks.serve.arrivals import WorkloadError
from antiphon.benchmarks.split.arrangements import Arrangement, colocated_of, split_of
from antiphon.benchmarks.split.mixes import MIXES, Mix, parse_mixes
from antiphon.benchmarks.split.observed import LoadRun, append_run, best_within, load_runs
from antiphon.benchmarks.split.run import (
    DRAIN_S,
    ComparisonIncomplete,
    HttpLoad,
    Ladder,
    RateSearch,
    device_name,
    run_comparison,
)
from antiphon.benchmarks.split.verdict import comparison, curve, sentence
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import AntiphonError, ConfigError


def deployment(**decode: Any) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "model": {"path": "somewhere/gpt-oss-20b"},
            "prefill": {"device": "cuda", "fp8_experts": "resident", "chunk_tokens": 8192},
            "decode": {"device": "cuda", "max_batch_size": 128, **decode},
        }
    )


def run(rate: float, share: float = 1.0, **changes: Any) -> LoadRun:
    """10 s of ``rate`` requests per second, of which ``share`` keep 20 ms between tokens."""
    requests = round(rate * 10)
    good = round(requests * share)
    made = LoadRun(
        arrangement="split",
        chunk_tokens=None,
        model="m",
        device="CPU",
        gpus=2,
        mix="chat",
        input_tokens=1000,
        output_tokens=500,
        rate_per_s=rate,
        duration_s=10.0,
        window_s=10.0,
        requests=requests,
        failed=0,
        ttft_ms=[100.0] * requests,
        itl_p99_ms=[15.0] * good + [90.0] * (requests - good),
        ttft_p50_p99_ms=(100.0, 100.0),
        itl_p50_p99_ms=(10.0, 15.0),
        output_tokens_per_s=1.0,
        peer=False,
        commit="c",
        date="d",
    )
    return replace(made, **changes)


LADDER = Ladder(1.0, 2.0, math.inf, 100.0, 0.0, 1000.0, 50.0, 0.9, refine=2)


def test_as_many_engines_as_the_split_has_gpus() -> None:
    config = deployment(kv_cache={"sliding_pages": 400, "full_pages": 4000})
    colocated = colocated_of(config, 2048)
    assert colocated.config is not None
    engines = colocated.config.decode
    assert (engines.replicas, colocated.config.prefill.replicas) == (2, 0)
    assert (engines.local_prefill, engines.chunk_tokens, engines.fp8_experts) == ("always", 2048, "resident")
    assert engines.kv_cache.sliding_pages == 400 + 2048 // 64 + 1
    assert split_of(config).gpus == colocated.gpus == 2
    wide = config.model_copy(update={"decode": config.decode.model_copy(update={"tensor_parallel": 2})})
    with pytest.raises(ConfigError, match="3 GPUs"):
        colocated_of(wide, 2048)
    with pytest.raises(ConfigError, match="needs prefill workers"):
        split_of(colocated.config)


def test_mixes_are_read() -> None:
    assert parse_mixes("long-in, chat,long-out") == list(MIXES)
    assert parse_mixes("mine=64/16") == [Mix("mine", 64, 16)]
    for bad in ("", "other", "mine=64", "mine=0/5", "mine=5/1"):
        with pytest.raises(WorkloadError):
            parse_mixes(bad)


def climbed(capacity: float, ladder: Ladder = LADDER) -> list[float]:
    """The loads that are tried on something that breaks above ``capacity``."""
    search = RateSearch(ladder, [])
    while (rate := search.next_rate()) is not None:
        search.add(run(rate, 1.0 if rate <= capacity else 0.5))
        assert len(search.known) < 30
    return [each.rate_per_s for each in search.known]


@pytest.mark.parametrize(
    ("capacity", "tried"),
    [
        (5.0, [1, 2, 4, 8, 5.66, 4.76]),  # between 4 and 8: their geometric mean, then below it
        (7.0, [1, 2, 4, 8, 5.66, 6.73]),
        (0.3, [1, 0.5, 0.25, 0.354, 0.297]),
        (0.01, [1, 0.5, 0.25, 0.125, 0.062]),
    ],
)
def test_the_load_rises_until_it_breaks(capacity: float, tried: list[float]) -> None:
    assert climbed(capacity) == pytest.approx(tried, rel=0.02)


def test_the_search_ends_at_the_highest_load_and_resumes() -> None:
    ladder = replace(LADDER, highest_per_s=4.0)
    assert climbed(100.0, ladder) == [1, 2, 4]
    assert RateSearch(LADDER, [run(1.0), run(2.0)]).next_rate() == 4.0
    with pytest.raises(AntiphonError, match="factor above 1"):
        replace(LADDER, step=1.0)
    with pytest.raises(AntiphonError, match="at least 5 requests"):
        replace(LADDER, duration_s=4.0)


def test_goodput_by_hand() -> None:
    runs = [run(1.0), run(2.0, 0.95), run(4.0, 0.5)]
    best = best_within(runs, 1000.0, 20.0, 0.9)
    assert best is not None
    assert best.good_per_s == pytest.approx(1.9)
    assert best.run.rate_per_s == 2.0
    loose = best_within(runs, 1000.0, 100.0, 0.9)
    assert loose is not None
    assert loose.good_per_s == pytest.approx(4.0)
    assert best_within(runs, 1000.0, 10.0, 0.9) is None
    assert best_within(runs, 50.0, 20.0, 0.9) is None
    # What failed is a request that was not good.
    assert best_within([run(1.0, failed=5, ttft_ms=[1.0] * 5, itl_p99_ms=[1.0] * 5)], 1000, 20, 0.9) is None


def test_each_limit_takes_the_best_chunk_and_the_loser_is_named() -> None:
    small: dict[str, Any] = {"arrangement": "colocated", "chunk_tokens": 256}
    large: dict[str, Any] = {"arrangement": "colocated", "chunk_tokens": 8192}
    runs = [
        run(2.0),
        run(4.0, 0.5),
        run(1.0, **small),
        run(6.0, 0.0, **large),  # fast, and nothing within 20 ms
        run(3.0, arrangement="other-split", peer=True),
    ]
    rows = comparison(runs, 1000.0, (20.0, 100.0), 0.9)
    assert [(row.itl_ms, row.label) for row in rows] == [
        (20.0, "split"),
        (20.0, "colocated, chunk 256"),
        (20.0, "other-split (peer)"),
        (100.0, "split"),
        (100.0, "colocated, chunk 8192"),
        (100.0, "other-split (peer)"),
    ]
    assert [row.against_split for row in rows] == pytest.approx([None, 0.5, 1.5, None, 1.5, 0.75])
    said = sentence("chat", rows)
    assert "at 20 ms the split serves 2.00 times" in said
    assert "at 100 ms **the split loses**, serving 0.67 times" in said
    assert curve(runs, "colocated", 1000.0, [10, 20, 100], 0.9) == [(10, 0.0), (20, 1.0), (100, 6.0)]


def test_runs_survive_a_file_and_a_repetition_replaces(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    append_run(path, run(1.0))
    append_run(path, run(2.0, 0.5))
    append_run(path, run(2.0, 0.75))
    assert load_runs(path) == [run(1.0), run(2.0, 0.75)]
    path.write_text('{"bench": "split", "runs": [{"mix": "chat"}]}')
    with pytest.raises(RecordError, match="run 0"):
        load_runs(path)
    path.write_text("[]")
    with pytest.raises(RecordError, match="no runs"):
        load_runs(path)


async def test_servers_are_measured_by_http_and_only_what_is_missing(script: Any, tmp_path: Path) -> None:
    fast, slow = await script(first_s=0.01, gap_s=0.002), await script(first_s=0.01, gap_s=0.05)
    started: list[str] = []

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        started.append(arrangement.name)
        assert arrangement.url is not None
        yield arrangement.url

    ladder = Ladder(10.0, 2.0, 20.0, 1.2, 0.2, 1000.0, 25.0, 0.9, refine=0)
    load, mix = HttpLoad(ladder, "CPU", "m"), Mix("tiny", 5, 4)
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
    quick = best_within([each for each in runs if each.arrangement == "quick"], 1000.0, 25.0, 0.9)
    assert quick is not None
    assert quick.run.rate_per_s == 20.0
    assert all(each.share(1000.0, 25.0) == 0 for each in runs if each.arrangement == "slow")
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

    ladder = Ladder(10.0, 2.0, 20.0, 1.0, 0.2, 1000.0, 25.0, 0.9, refine=0)
    load, output = HttpLoad(ladder, "CPU", "m"), tmp_path / "split.json"

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


def test_a_gpu_that_is_not_there_is_said() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert device_name(uses_gpu=False) == "CPU"
    with pytest.raises(AntiphonError, match="there is none here"):
        device_name(uses_gpu=True)
