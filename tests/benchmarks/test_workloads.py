"""Arrival processes, lengths, traces and prompts."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks.serve.arrivals import Arrivals, WorkloadError, parse_arrivals
from antiphon.benchmarks.serve.command import Options, make_sessions
from antiphon.benchmarks.serve.lengths import parse_lengths
from antiphon.benchmarks.serve.observation import Observation, parse_server_timing
from antiphon.benchmarks.serve.prompts import WORDS, ids_of, text_of
from antiphon.benchmarks.serve.server_metrics import parse_stages
from antiphon.benchmarks.serve.slo import Slo, goodput, parse_duration_s
from antiphon.benchmarks.serve.statistics import percentile, summarise
from antiphon.benchmarks.serve.workload import (
    Segment,
    Shape,
    closed_loop,
    open_loop,
    read_trace,
    standing,
)
from antiphon.router.harmony.vocabulary import load_vocabulary


def gaps(arrivals: Arrivals, count: int) -> list[float]:
    times = [0.0, *itertools.islice(arrivals.times(random.Random(1)), count)]
    assert times == sorted(times)
    return [late - early for early, late in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("text", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma:cv=3", 3.0), ("gamma:cv=0.5", 0.5)]
)
def test_gaps_have_the_rate_and_the_spread(text: str, cv: float) -> None:
    found = gaps(parse_arrivals(text, 20.0), 40_000)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.08, abs=1e-9)


def test_bursts_keep_the_mean_rate_and_are_bursty() -> None:
    times = list(itertools.accumulate(gaps(parse_arrivals("mmpp:factor=5,share=0.1,burst=2", 20.0), 60_000)))
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.1)
    counts = [0] * (int(times[-1]) + 1)
    for time in times:
        counts[int(time)] += 1
    # A Poisson process has dispersion 1; theory for these settings gives far above it.
    assert statistics.pvariance(counts) / statistics.fmean(counts) > 5


@pytest.mark.parametrize(
    "text",
    [
        "weibull",
        "gamma:cv=0",
        "gamma:cv",
        "gamma:cv=2,k=1",
        "poisson:x=1",
        "mmpp:factor=20,share=0.1",
        "gamma:cv=nan",
    ],
)
def test_bad_arrivals_are_named(text: str) -> None:
    with pytest.raises(WorkloadError, match="arrivals"):
        parse_arrivals(text, 1.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_rates_are_named(rate: float) -> None:
    with pytest.raises(WorkloadError, match="rate"):
        parse_arrivals("poisson", rate)


def test_lengths_follow_their_distributions(tmp_path: Path) -> None:
    rng = random.Random(0)
    assert {parse_lengths("512", "x").draw(rng) for _ in range(9)} == {512}
    assert {parse_lengths("uniform:low=3,high=5", "x").draw(rng) for _ in range(99)} == {3, 4, 5}
    drawn = [parse_lengths("lognormal:mean=1000,sigma=0.8", "x").draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(1000, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(1000 * 2.718281828 ** (-0.32), rel=0.05)
    cut = [parse_lengths("lognormal:mean=1000,sigma=2,low=10,high=900", "x").draw(rng) for _ in range(999)]
    assert (min(cut), max(cut)) == (10, 900)
    (tmp_path / "lengths").write_text("7\n9\n")
    assert {parse_lengths(f"file:{tmp_path}/lengths", "x").draw(rng) for _ in range(50)} == {7, 9}


@pytest.mark.parametrize(
    "text",
    ["0", "-3", "many", "uniform:low=5,high=3", "uniform:low=5", "lognormal:mean=0,sigma=1", "file:/nowhere"],
)
def test_bad_lengths_are_named(text: str) -> None:
    with pytest.raises(WorkloadError, match="input-tokens"):
        parse_lengths(text, "input-tokens")


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 8]},
        {"timestamp": 1000, "input_length": 1000, "output_length": 3, "hash_ids": [5, 6]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_trace(path, time_scale=0.5)
    assert (first.arrives_s, second.arrives_s) == (0.0, 1.0)
    prompts = [ids_of(session.turns[0].added) for session in (first, second)]
    assert [len(prompt) for prompt in prompts] == [1000, 1100]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:1000] == prompts[1][512:1000]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp_s": 0, "input_length": 0, "output_length": 1}']
)
def test_a_bad_trace_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 3, "output_length": 4}\n' + line)
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:2"):
        read_trace(path)


def test_the_same_seed_gives_the_same_load() -> None:
    shape = Shape(parse_lengths("uniform:low=10,high=99", "x"), parse_lengths("5", "x"), 8, 3, turns=2)
    arrivals = parse_arrivals("gamma:cv=2", 5.0)
    one, two, other = (open_loop(shape, arrivals, seed, sessions=50, duration_s=None) for seed in (1, 1, 2))
    assert one == two != other
    assert [s.turns for s in closed_loop(shape, 1, 50)] == [s.turns for s in one]


def test_a_load_has_an_end() -> None:
    shape = Shape(parse_lengths("10", "x"), parse_lengths("5", "x"))
    arrivals = parse_arrivals("constant", 10.0)
    assert len(open_loop(shape, arrivals, 0, sessions=None, duration_s=2.05)) == 20
    with pytest.raises(WorkloadError, match="without end"):
        open_loop(shape, arrivals, 0, sessions=None, duration_s=None)
    with pytest.raises(WorkloadError, match="no request"):
        open_loop(shape, arrivals, 0, sessions=None, duration_s=0.01)


def test_a_load_may_find_requests_in_service() -> None:
    """As many as were asked for, within the time, with every part of an answer left to them."""
    shape = Shape(parse_lengths("100", "input-tokens"), parse_lengths("1000", "output-tokens"))
    found = standing(shape, 7, 400, 2.0)
    assert len(found) == 400
    assert all(0 < session.arrives_s < 2 for session in found)
    left = [session.turns[0].output_tokens for session in found]
    assert min(left) >= 1
    assert max(left) <= 1000
    assert statistics.fmean(left) == pytest.approx(500, rel=0.1)
    assert len({session.turns[0].added for session in found}) == 400
    assert standing(shape, 7, 0, 0.0) == []
    with pytest.raises(WorkloadError, match="warm-up"):
        standing(shape, 7, 1, 0.0)
    options = Options("http://x", rate_per_s=5.0, duration_s=10.0, warmup_s=4.0, standing=10)
    times = [session.arrives_s for session in make_sessions(options)]
    assert times == sorted(times)
    assert sum(time < 2 for time in times) >= 10
    with pytest.raises(WorkloadError, match="open loop"):
        make_sessions(replace(options, users=3, requests=5))


def test_short_loads_may_have_as_many_requests_as_on_average() -> None:
    """Exactly so many before and after the warm-up, and with the gaps of a Poisson process."""
    options = Options("http://x", rate_per_s=200.0, duration_s=50.0, warmup_s=10.0, exact_counts=True)
    times = [session.arrives_s for session in make_sessions(options)]
    assert times == sorted(times)
    assert (sum(time < 10 for time in times), len(times)) == (2000, 10_000)
    found = [late - early for early, late in itertools.pairwise(times)]
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(1, rel=0.05)
    assert make_sessions(options) == make_sessions(options)
    assert make_sessions(options) != make_sessions(replace(options, seed=1))
    for wrong in ({"arrivals": "constant"}, {"requests": 5}, {"duration_s": None, "requests": 5}):
        with pytest.raises(WorkloadError, match="exact counts"):
            make_sessions(replace(options, **wrong))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="no request"):
        make_sessions(replace(options, rate_per_s=0.001))


def test_every_word_is_one_token_of_the_model() -> None:
    vocabulary = load_vocabulary()
    assert len(WORDS) == len(set(WORDS)) > 90
    assert all(len(vocabulary.encode(f" {word}")) == 1 for word in WORDS)


@settings(max_examples=40, deadline=None)
@given(shared=st.integers(0, 40), own=st.integers(1, 60), overhead=st.integers(0, 30), seed=st.integers(0, 9))
def test_text_has_the_tokens_that_were_asked(shared: int, own: int, overhead: int, seed: int) -> None:
    segments = [*([Segment(seed, shared)] if shared else []), Segment(seed + 10, own)]
    text = text_of(segments, overhead)
    assert len(load_vocabulary().encode(text)) + overhead == max(shared + own, overhead + 1)
    assert len(ids_of(segments)) == shared + own


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == pytest.approx(3.97)
    assert percentile([7.0], 0.99) == 7.0
    summary = summarise([3.0, 1.0, 2.0])
    assert (summary.count, summary.mean, summary.p50, summary.max) == (3, 2.0, 2.0, 3.0)
    assert summarise([]).p99 is None


def observed(ttft_s: float, gaps_s: list[float], error: str | None = None) -> Observation:
    seen = Observation(0, 0, intended_s=100.0, error=error, output_tokens=1 + len(gaps_s))
    now = 100.0 + ttft_s
    seen.saw_output(now)
    for gap in gaps_s:
        now += gap
        seen.saw_output(now)
    return seen


def test_goodput_by_hand() -> None:
    requests = [
        observed(0.5, [0.01] * 9),
        observed(1.5, [0.01] * 9),  # late first token
        observed(0.5, [0.01] * 8 + [0.5]),  # one long gap: TPOT 64 ms
        observed(0.5, [0.01] * 9, error="reset"),
        observed(0.5, []),  # one token has no TPOT
    ]
    slo = Slo.parse("ttft=1s, tpot=20ms")
    assert [slo.met_by(each) for each in requests] == [True, False, False, False, True]
    found = goodput(slo, requests, 10.0)
    assert (found.good, found.share, found.requests_per_s) == (2, 0.4, 0.2)
    assert Slo.parse("itl=400ms").met_by(requests[2]) is False
    assert requests[2].tpot_s == pytest.approx(0.58 / 9)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("1.5s", 1.5), ("250us", 250e-6), ("2min", 120.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "ms", "0s", "-1s", "3 days", ""])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(WorkloadError, match="slo ttft"):
        Slo.parse(f"ttft={text}")


def test_stages_of_servers() -> None:
    assert parse_server_timing('queue;dur=1.5, prefill;desc="x";dur=20, odd, bad;dur=x') == {
        "queue": pytest.approx(0.0015),
        "prefill": pytest.approx(0.02),
    }
    name = "antiphon_stage_duration_seconds"
    before = parse_stages(
        f'{name}_sum{{model_name="m",stage="queue"}} 1.0\n{name}_count{{stage="queue"}} 10.0\n'
    )
    after = parse_stages(
        f'{name}_sum{{stage="queue"}} 4.0\n{name}_count{{stage="queue"}} 20.0\n'
        f'{name}_sum{{stage="prefill"}} 1.0\n{name}_count{{stage="prefill"}} 2.0\nother 3\n'
    )
    assert after.mean_since(before) == {"queue": pytest.approx(0.3), "prefill": pytest.approx(0.5)}
