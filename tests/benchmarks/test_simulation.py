"""The simulation of a deployment against closed forms and by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from antiphon.benchmarks.plan.check import (
    SCENARIOS,
    check,
    cluster_of,
    grown,
    judged,
    slices_of,
    step_times,
    warmup_of,
)
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.plan.planner import Targets, plans
from antiphon.benchmarks.plan.queueing import mean_wait_md1_s
from antiphon.benchmarks.plan.simulation import (
    Cluster,
    Patience,
    Request,
    Simulation,
    requests_at,
    weighted_summary,
)
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.serve.arrivals import GammaGaps


def cluster(**changes: Any) -> Cluster:
    settings: dict[str, Any] = {
        "prefill_workers": 1,
        "decode_workers": 1,
        "places": 10_000,
        "prefill_s": lambda tokens: tokens * 1e-3,
        "handover_s": lambda tokens: 0.0,
        "step_s": lambda batch, context: 0.01,
    }
    return Cluster(**settings | changes)


def poisson(rate: float, seconds: float, inputs: int = 10, outputs: int = 1) -> Iterable[Request]:
    times = GammaGaps(rate).times(random.Random(3))
    return requests_at(times, seconds, lambda _: inputs, lambda _: outputs, 0)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prefill_is_an_md1_queue(load: float) -> None:
    outcome = Simulation(cluster(), 50.0).run(poisson(load * 100, 1500.0))
    assert outcome.wait_prefill.mean == pytest.approx(mean_wait_md1_s(load * 100, 0.01), rel=0.08)
    assert outcome.prefill_utilisation == pytest.approx(load, rel=0.03)


def test_decode_holds_what_littles_law_says() -> None:
    outcome = Simulation(cluster(prefill_s=lambda _: 0.0), 20.0).run(poisson(50.0, 400.0, outputs=40))
    assert outcome.decode_mean_batch == pytest.approx(50 * 40 * 0.01, rel=0.05)
    assert outcome.output_tokens_per_s == pytest.approx(2000, rel=0.05)
    assert outcome.itl.p50 == 0.01
    assert outcome.requests == pytest.approx(50 * 380, rel=0.05)


def test_one_request_by_hand() -> None:
    request = Request(1.0, 100, 5)
    outcome = Simulation(cluster(handover_s=lambda _: 0.02)).run([request])
    assert request.first_s == pytest.approx(1.0 + 0.1 + 0.02 + 0.01)
    assert request.ended_s == pytest.approx(1.12 + 5 * 0.01)
    assert outcome.requests == 1


def test_a_second_request_joins_at_the_next_step() -> None:
    first, second = Request(0.0, 100, 50), Request(0.0, 55, 2)
    Simulation(cluster(prefill_workers=2, step_s=lambda batch, context: 0.01 * batch)).run([first, second])
    # The second's KV is there at 0.055 and runs alone: steps end at 0.065 and 0.075, before the first comes.
    assert second.first_s == pytest.approx(0.065)
    assert first.first_s == pytest.approx(0.11)
    first, second = Request(0.0, 100, 50), Request(0.0, 124, 2)
    Simulation(cluster(prefill_workers=2, step_s=lambda batch, context: 0.01 * batch)).run([first, second])
    # The first's third step ends at 0.13; then both take 20 ms a step for two steps; then it goes on alone.
    assert second.first_s == pytest.approx(0.15)
    assert second.ended_s == pytest.approx(0.17)
    assert first.ended_s == pytest.approx(0.17 + (50 - 3 - 2) * 0.01)


def test_a_place_is_needed_before_prefill() -> None:
    first, second = Request(0.0, 10, 100), Request(0.0, 10, 1)
    Simulation(cluster(places=1)).run([first, second])
    assert second.wait_place_s == pytest.approx(first.ended_s)
    assert second.first_s == pytest.approx(first.ended_s + 0.01 + 0.01)


def test_requests_go_where_most_room_is() -> None:
    requests = [Request(0.0, 1, 1000) for _ in range(8)]
    batches: list[int] = []

    def step_s(batch: int, context: float) -> float:
        batches.append(batch)
        return 0.01

    Simulation(cluster(decode_workers=4, prefill_workers=8, step_s=step_s)).run(requests)
    assert max(batches) == 2


def test_context_grows_and_goes() -> None:
    seen: list[float] = []

    def step_s(batch: int, context: float) -> float:
        seen.append(context)
        return 0.01

    Simulation(cluster(prefill_workers=2, step_s=step_s)).run([Request(0.0, 100, 10), Request(0.0, 124, 4)])
    assert seen == [100, 100 + 3 + 124, 100 + 7]


def test_weighted_summaries() -> None:
    summary = weighted_summary({2.0: 1, 1.0: 98, 3.0: 1})
    assert (summary.count, summary.p50, summary.p99, summary.max) == (100, 1.0, 2.0, 3.0)
    assert summary.mean == pytest.approx(1.03)


def test_a_plan_holds_what_it_was_made_for() -> None:
    model = build("gpt-oss-20b", [])
    plan = plans(model, Targets(0.5, 0.01, 2000, 200, 20))[0]
    for found in check(model, plan, scenarios=SCENARIOS[:2], duration_s=120, warmup_s=10):
        assert found.holds, found
    assert plan.prefill.utilisation == pytest.approx(found.outcome.prefill_utilisation, rel=0.15)


def test_step_times_are_those_of_the_cost_model() -> None:
    model, layout = build("gpt-oss-120b", []), Layout(4, 4)
    step_s = step_times(model, layout)
    for batch, context in ((1, 500), (16, 4096), (64, 20_000)):
        assert step_s(batch, batch * context) == pytest.approx(
            model.decode_step_s(layout, batch, context), rel=1e-6
        )


def test_a_simulation_without_patience_ends_early_and_holds_nothing() -> None:
    model = build("gpt-oss-20b", [])
    plan = plans(model, Targets(0.5, 0.01, 2000, 200, 20))[0]
    requests = [Request(index * 1e-3, 2000, 200) for index in range(400)]
    whole = Simulation(cluster_of(model, plan)).run(Request(r.arrives_s, 2000, 200) for r in requests)
    assert (whole.ttft.p50 or 0.0) > 0.5  # the load is meant to be too much
    short = Simulation(cluster_of(model, plan), patience=Patience(0.5, 20)).run(requests)
    assert short.given_up
    assert not whole.given_up
    assert short.simulated_s < 0.7 * whole.simulated_s
    assert not judged(plan, SCENARIOS[0], short).holds


def test_patience_changes_nothing_where_targets_hold() -> None:
    load = list(poisson(50.0, 40.0, outputs=40))
    outcomes = [
        Simulation(cluster(), 5.0, patience).run(Request(r.arrives_s, 10, 40) for r in load)
        for patience in (None, Patience(10.0, 0))
    ]
    assert outcomes[0] == outcomes[1]


def test_of_the_largest_loads_a_slice_says_how_many_workers_hold_them() -> None:
    model = build("gpt-oss-20b", [])
    small = plans(model, Targets(0.5, 0.01, 2000, 20, 60))[0]
    large = replace(
        small,
        targets=replace(small.targets, requests_per_s=60.0 * 400),
        prefill=replace(small.prefill, workers=small.prefill.workers * 400),
        decode=replace(small.decode, workers=small.decode.workers * 400),
    )
    warmup_s = warmup_of(large, 60.0)
    assert warmup_s < 5.0
    assert slices_of(small, warmup_s) == 1
    assert slices_of(large, warmup_s) > 1
    found = grown(model, large, SCENARIOS[2], duration_s=4.0, warmup_s=0.5)
    assert found is not None
    assert large.prefill.workers <= found.prefill.workers <= 4 * large.prefill.workers
    assert large.decode.workers <= found.decode.workers <= 4 * large.decode.workers


def test_thousands_of_gpus_are_simulated_request_by_request() -> None:
    model = build("gpt-oss-120b", [])
    plan = plans(model, Targets(1.0, 0.03, 8000, 300, 10_000.0))[0]
    assert plan.gpus > 2000
    checked = check(model, plan, scenarios=SCENARIOS[1:2], duration_s=6.0, warmup_s=3.0)[0]
    assert checked.outcome.requests == pytest.approx(10_000 * 3, rel=0.05)
    assert checked.outcome.prefill_utilisation == pytest.approx(plan.prefill.utilisation, rel=0.2)
    assert checked.holds
