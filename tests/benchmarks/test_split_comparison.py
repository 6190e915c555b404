"""The comparison of split and colocated: arrangements, the search for the highest load, goodput, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import Layout, RecordError
from antiphon.benchmarks.serve.arrivals import WorkloadError
from antiphon.benchmarks.split import run as split_run
from antiphon.benchmarks.split.arrangements import Arrangement, colocated_of, split_of
from antiphon.benchmarks.split.command import Limits, run_command
from antiphon.benchmarks.split.expected import capacity_per_s, in_service, poisson_mean
from antiphon.benchmarks.split.ladder import Ladder, RateSearch
from antiphon.benchmarks.split.loads import ExpectedLoads, FixedLoads, Seconds, load_seconds
from antiphon.benchmarks.split.mixes import MIXES, Mix, parse_mixes
from antiphon.benchmarks.split.observed import LoadRun, append_run, best_within, load_runs
from antiphon.benchmarks.split.run import (
    ComparisonIncomplete,
    HttpLoad,
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
        (0.3, [1, 0.5, 0.125, 0.25, 0.354, 0.297]),  # down in strides that double, then as before
        (0.01, [1, 0.5, 0.125]),  # a sixteenth of that would be too few requests to say anything
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


def test_one_limit_s_loads_tell_of_another() -> None:
    """Under 20 ms half of the requests are good from 2/s on; under 100 ms all are up to 8/s."""

    def measured(rate: float) -> LoadRun:
        requests = round(rate * 10)
        itl = 15.0 if rate <= 2 else 40.0 if rate <= 8 else 200.0
        return run(rate, ttft_ms=[100.0] * requests, itl_p99_ms=[itl] * requests)

    loose = RateSearch(replace(LADDER, first_per_s=4.0, itl_ms=100.0, refine=0), [])
    tight = RateSearch(replace(LADDER, first_per_s=3.0, itl_ms=20.0, refine=0), [])
    tried = []
    for search in (loose, tight):
        while (rate := search.next_rate()) is not None:
            tried.append(rate)
            for each in (loose, tight):
                each.add(measured(rate))
    assert tried == pytest.approx([4, 8, 16, 3, 1.5], rel=0.02)
    assert best_within([measured(rate) for rate in tried], 1000.0, 20.0, 0.9) is not None


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


def test_a_load_that_is_too_high_decides_nothing_about_less() -> None:
    slow: dict[str, Any] = {"arrangement": "colocated", "chunk_tokens": 256}
    small = run(1.0, arrangement="colocated", chunk_tokens=256)
    tried = [run(2.0, 0.8), run(4.0, 0.5), small]
    rows = comparison(tried, 1000.0, (20.0,), 0.9)
    assert [row.goodput for row in rows] == ["< 2 (80%)", "1.00"]
    assert rows[1].against_split is None
    said = sentence("chat", rows)
    assert (
        "at 20 ms the split may serve less than was tried (of 2/s, the least that was tried, 80% kept" in said
    )
    assert "colocated engines serve 1.00/s" in said
    assert "loses" not in said
    said = sentence("chat", comparison([run(0.5, 0.8), small], 1000.0, (20.0,), 0.9))
    assert "**the split loses**, serving less than 0.50 times what the other does" in said
    said = sentence("chat", comparison([run(2.0), run(1.0, 0.5, **slow)], 1000.0, (20.0,), 0.9))
    assert "colocated engines lose, serving less than 0.50 times" in said
    said = sentence("chat", comparison([run(2.0, 0.5), run(1.0, 0.5, **slow)], 1000.0, (20.0,), 0.9))
    assert "neither serves a load that was tried" in said


def test_runs_survive_a_file_and_a_repetition_replaces(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    append_run(path, run(1.0))
    append_run(path, run(2.0, 0.5))
    append_run(path, run(2.0, 0.75))
    assert load_runs(path) == [run(1.0), run(2.0, 0.75)]
    other = run(3.0, settings={"seed": 1})
    append_run(path, other)
    assert load_runs(path) == [run(1.0), run(2.0, 0.75), other]
    assert json.loads(path.read_text())["settings"] == [{}, {"seed": 1}]
    append_run(path, run(1.0, mix="other"))
    append_run(path, run(4.0), anew=True)
    assert load_runs(path) == [run(1.0, mix="other"), run(4.0)]
    path.write_text('{"bench": "split", "runs": [{"mix": "chat"}]}')
    with pytest.raises(RecordError, match="run 0: a run without its settings"):
        load_runs(path)
    path.write_text('{"bench": "split", "settings": [{}], "runs": [{"mix": "chat", "settings": 0}]}')
    with pytest.raises(RecordError, match="run 0: no run"):
        load_runs(path)
    path.write_text("[]")
    with pytest.raises(RecordError, match="no runs"):
        load_runs(path)


def test_a_gpu_that_is_not_there_is_said() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert device_name(uses_gpu=False) == "CPU"
    with pytest.raises(AntiphonError, match="there is none here"):
        device_name(uses_gpu=True)


def test_what_is_expected_of_an_arrangement_by_hand() -> None:
    model, config = build("gpt-oss-20b", []), deployment()
    split, mix = split_of(config), Mix("chat", 1000, 500)
    one = split.config
    assert one is not None
    context, layout = 1250.0, Layout()
    step_s = model.decode_step_s(layout, 128, context)
    decode_bound = 128 / (500 * step_s)
    prompts = 0.85 / model.prefill_s(layout, 1000)
    assert capacity_per_s(model, split, mix, 0.05) == pytest.approx(min(decode_bound, prompts))
    # Half the step's time: a smaller batch; less than one sequence takes: none.
    assert capacity_per_s(model, split, mix, step_s / 2) < decode_bound
    assert capacity_per_s(model, split, mix, 1e-5) == 0.0
    both = colocated_of(config, 8192)
    each = 1 / (model.prefill_s(layout, 1000) + 500 * step_s / 128)
    assert capacity_per_s(model, both, mix, 0.05) == pytest.approx(2 * each)
    # In 5 ms no chunk of 1,000 tokens fits beside a step: few prompts may come in the time of an answer.
    alone_s = model.decode_step_s(layout, 1, context)
    rare = 2 * poisson_mean(4, 0.9) / (500 * alone_s)
    assert capacity_per_s(model, both, mix, 0.005) == pytest.approx(rare)
    assert rare < capacity_per_s(model, both, mix, 0.05)
    assert capacity_per_s(model, Arrangement("other", 2, url="http://x"), mix, 0.05) > 0
    # Little's law, at a batch whose step is its own.
    found = in_service(model, split, mix, 10.0)
    assert found == pytest.approx(10.0 * 500 * model.decode_step_s(layout, found, context), abs=1)
    assert in_service(model, split, mix, 1e6) == 128
    each = in_service(model, both, mix, 10.0) / 2  # of an engine that prompts keep from decoding
    left = 1 - 5.0 * model.prefill_s(layout, 1000)
    assert each == pytest.approx(5.0 * 500 * model.decode_step_s(layout, each, context) / left, abs=1)
    assert poisson_mean(0, 0.9) == pytest.approx(-math.log(0.9))


def test_ladders_begin_near_what_is_expected_and_chunks_that_cannot_win_are_left_out() -> None:
    model, config = build("gpt-oss-20b", []), deployment()
    split, small, large = split_of(config), colocated_of(config, 512), colocated_of(config, 8192)
    mix = Mix("long-in", 5000, 250)
    loads = ExpectedLoads(
        replace(LADDER, duration_s=60.0, step=1.25),
        {"long-in": Seconds(9.0, 2.0)},
        (10.0, 20.0, 50.0),
        model,
        [split, small, large],
    )
    ladders = loads.ladders(split, mix)
    assert [each.itl_ms for each in ladders] == [50.0, 20.0, 10.0]
    assert {(each.duration_s, each.warmup_s, each.step) for each in ladders} == {(9.0, 2.0, 1.25)}
    assert ladders[0].first_per_s == pytest.approx(0.9 * capacity_per_s(model, split, mix, 0.05))
    # 8,192 tokens of prompt fit into no step of 20 ms, 512 do.
    assert [each.itl_ms for each in loads.ladders(large, mix)] == [50.0, 10.0]
    assert [each.itl_ms for each in loads.ladders(small, mix)][:2] == [50.0, 20.0]
    assert loads.ladders(large, Mix("chat", 1000, 500))[0].duration_s == 60.0
    assert loads.ladders(large, Mix("short", 500, 500)) == []  # as with chunks of 512
    assert loads.ladders(small, Mix("short", 500, 500))
    assert loads.standing(split, mix, 5.0) == in_service(model, split, mix, 5.0)
    assert load_seconds({"chat": 9.0}, {"chat": 2.0}) == {"chat": Seconds(9.0, 2.0)}
    with pytest.raises(ConfigError, match="chat: a duration and a warm-up"):
        load_seconds({"chat": 9.0}, {})


class TimedLoad(HttpLoad):
    """Takes as long as a load does, by a clock that nothing else moves."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now

    async def warm(self, url: str, mix: Mix) -> None:
        TimedLoad.now += 2.0

    async def __call__(self, url: str, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> LoadRun:
        TimedLoad.now += 4.2
        return run(rate_per_s, arrangement=arrangement.name, mix=mix.name)


async def test_arrangements_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 s for two of them: the first may use 4.5, in which no load of up to 6 s ends."""
    monkeypatch.setattr(split_run, "time", TimedLoad)
    turns: list[str] = []

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        yield "http://nobody"

    ladder = replace(LADDER, duration_s=4.0, first_per_s=10.0)
    with pytest.raises(ComparisonIncomplete, match=r"x, a: no time.*y, a: no time"):
        await run_comparison(
            [Arrangement(name, 2, url="http://nobody") for name in ("x", "y")],
            [Mix("a", 5, 4)],
            TimedLoad(FixedLoads(ladder, {}).ladders, "CPU", "m", 0, 2.0),
            tmp_path / "split.json",
            again=False,
            on_run=lambda run, known: turns.append(run.arrangement),
            start=start,
            limit_s=9.0,
        )
    assert turns == ["y"]  # what the first left unused is the others'


def test_a_warm_up_of_the_whole_duration_is_refused(tmp_path: Path) -> None:
    limits = Limits(2000.0, (20.0,), 0.9)
    with pytest.raises(AntiphonError, match="warm-up ends within"):
        run_command(
            deployment(),
            [],
            limits,
            chunks=[],
            first_rate_per_s=None,
            duration_s=10.0,
            warmup_s=10.0,
            output=tmp_path / "split.json",
        )
