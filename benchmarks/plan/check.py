"""Puts a plan under simulated load: steady and bursty arrivals, equal and mixed lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import Plan, Targets, handover
from antiphon.benchmarks.plan.simulation import (
    Cluster,
    Outcome,
    Patience,
    Request,
    Simulation,
    StepTime,
    requests_at,
)
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.serve.arrivals import Arrivals, GammaGaps, Modulated
from antiphon.benchmarks.serve.lengths import Fixed, Lengths, LogNormal
from antiphon.benchmarks.serve.statistics import Summary

MOST_REQUESTS = 200_000
"""Requests of one scenario: of a large load a shorter time says as much."""
GROWTH_REQUESTS = 20_000
"""Requests of one simulation while a larger plan is looked for, and at least."""
LONGEST_WARMUP_S, STAYS = 30.0, 4.0
"""A simulated deployment is warm after so many stays of a request, or after the first of the two."""
LARGEST_GROWTH = 4.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load at the plan's mean rate and mean lengths."""

    name: str
    arrivals: Callable[[float], Arrivals]
    mixed: bool


SCENARIOS = (
    Scenario("Poisson, equal lengths", GammaGaps, mixed=False),
    Scenario("Poisson, mixed lengths", GammaGaps, mixed=True),
    Scenario("bursts, mixed lengths", lambda rate: Modulated(rate, 2.5, 0.2, 5.0), mixed=True),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A scenario's outcome against the targets."""

    scenario: str
    outcome: Outcome
    ttft_s: float
    """At the targets' quantile."""
    itl_s: float
    holds: bool


def check(
    model: CostModel,
    plan: Plan,
    *,
    scenarios: Sequence[Scenario] = SCENARIOS,
    duration_s: float = 300.0,
    warmup_s: float = LONGEST_WARMUP_S,
    seed: int = 0,
) -> list[Checked]:
    """Simulate the scenarios; of loads of many requests a second, a shorter time than asked for."""
    enough_s = max(2 * warmup_s, MOST_REQUESTS / plan.targets.requests_per_s)
    duration_s = min(duration_s, enough_s)
    return [
        judged(plan, scenario, Simulation(cluster_of(model, plan), warmup_s).run(requests))
        for scenario in scenarios
        for requests in [_load(plan.targets, scenario, duration_s, seed)]
    ]


def judged(plan: Plan, scenario: Scenario, outcome: Outcome) -> Checked:
    """A scenario's outcome against the plan's targets."""
    targets = plan.targets
    ttft_s, itl_s = (
        at_quantile(outcome.ttft, targets.quantile),
        at_quantile(outcome.itl, targets.quantile),
    )
    kept = outcome.requests > 0 and ttft_s <= targets.ttft_s and itl_s <= targets.itl_s
    return Checked(scenario.name, outcome, ttft_s, itl_s, kept and not outcome.given_up)


def warmup_of(plan: Plan, duration_s: float) -> float:
    """How long a simulation of ``duration_s`` runs before it counts: until the deployment has filled."""
    stay_s = plan.targets.ttft_s + plan.targets.output_tokens * plan.decode.step_s
    return min(LONGEST_WARMUP_S, duration_s / 5, STAYS * stay_s)


def _load(targets: Targets, scenario: Scenario, duration_s: float, seed: int) -> Iterable[Request]:
    inputs, outputs = _lengths(targets, scenario.mixed)
    times = scenario.arrivals(targets.requests_per_s).times(random.Random(seed))
    return requests_at(times, duration_s, inputs.draw, outputs.draw, seed)


def cluster_of(model: CostModel, plan: Plan) -> Cluster:
    """The plan as the simulation sees it."""
    prefill, decode = plan.prefill, plan.decode

    @cache
    def prompt_s(tokens: int) -> float:
        return model.prefill_s(prefill.layout, tokens)

    @cache
    def handover_s(tokens: int) -> float:
        return handover(model, plan.targets, prefill.layout, prompt_s(tokens), tokens)

    return Cluster(
        prefill_workers=prefill.workers,
        decode_workers=decode.workers,
        places=decode.batch,
        prefill_s=lambda tokens: prompt_s(_grid(tokens)),
        handover_s=lambda tokens: handover_s(_grid(tokens)),
        step_s=step_times(model, decode.layout),
        prefill_gpus=prefill.layout.gpus,
        decode_gpus=decode.layout.gpus,
    )


def step_times(model: CostModel, layout: Layout) -> StepTime:
    """Step times by batch and tokens together: for one batch linear in the tokens beyond the window."""

    @cache
    def line(batch: int) -> tuple[float, float]:
        short, long = 1024.0, 8192.0
        first, second = (model.decode_step_s(layout, batch, context) for context in (short, long))
        slope = (second - first) / (batch * (long - short))
        return first - slope * batch * short, slope

    def step_s(batch: int, context_tokens: float) -> float:
        base, slope = line(batch)
        return base + slope * context_tokens

    return step_s


def at_quantile(summary: Summary, quantile: float) -> float:
    """The summary's percentile at ``quantile`` or, where it has none, the next higher one; 0 of nothing."""
    shares = (0.5, 0.9, 0.95, 0.99, 1.0)
    values = (summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
    value = next(v for share, v in zip(shares, values, strict=True) if share >= quantile - 1e-9)
    return value or 0.0


def _lengths(targets: Targets, mixed: bool) -> tuple[Lengths, Lengths]:
    if not mixed:
        return Fixed(targets.input_tokens), Fixed(targets.output_tokens)
    sigma = targets.length_sigma
    return LogNormal(targets.input_tokens, sigma), LogNormal(targets.output_tokens, sigma)


def _grid(tokens: int) -> int:
    """Round up to 64 tokens, so that a simulation asks the cost model for few different prompts."""
    return -(-tokens // 64) * 64


def grown(
    model: CostModel, plan: Plan, scenario: Scenario, *, duration_s: float, warmup_s: float
) -> Plan | None:
    """The plan with more workers, so that ``scenario`` holds; None when four times as many do not do.

    First both pools by one factor, then each is cut back on its own. Of large loads less time is simulated,
    of the largest a slice; all candidates get the same requests, and one that has failed for certain is left
    at once.
    """
    targets, slices = plan.targets, slices_of(plan, warmup_s)
    length_s = min(duration_s, max(4 * warmup_s, GROWTH_REQUESTS / targets.requests_per_s))
    load = replace(targets, requests_per_s=targets.requests_per_s / slices)
    drawn = [(r.arrives_s, r.input_tokens, r.output_tokens) for r in _load(load, scenario, length_s, 0)]
    counted = sum(arrives_s >= warmup_s for arrives_s, _, _ in drawn)
    patience = Patience(targets.ttft_s, math.ceil((1 - targets.quantile) * counted))

    def holds(candidate: Plan) -> bool:
        simulation = Simulation(_slice(cluster_of(model, candidate), slices), warmup_s, patience)
        return judged(candidate, scenario, simulation.run(Request(*each) for each in drawn)).holds

    def scaled(prefill: float, decode: float) -> Plan:
        first, second = plan.prefill, plan.decode
        return replace(
            plan,
            prefill=replace(first, workers=math.ceil(first.workers * prefill - 1e-9)),
            decode=replace(second, workers=math.ceil(second.workers * decode - 1e-9)),
        )

    if not holds(scaled(LARGEST_GROWTH, LARGEST_GROWTH)):
        return None
    both = _least_factor(LARGEST_GROWTH, lambda factor: holds(scaled(factor, factor)))
    prefill = _least_factor(both, lambda factor: holds(scaled(factor, both)))
    decode = _least_factor(both, lambda factor: holds(scaled(prefill, factor)))
    return scaled(prefill, decode)


def slices_of(plan: Plan, warmup_s: float) -> int:
    """Into how many equal parts a plan is cut so that one part's simulation stays short."""
    return math.ceil(4 * warmup_s * plan.targets.requests_per_s / MOST_REQUESTS)


def _slice(cluster: Cluster, slices: int) -> Cluster:
    """One of equal parts; what does not divide is left out, which errs on the safe side."""
    prefill, decode = (max(1, n // slices) for n in (cluster.prefill_workers, cluster.decode_workers))
    return replace(cluster, prefill_workers=prefill, decode_workers=decode)


def _least_factor(high: float, holds: Callable[[float], bool]) -> float:
    """Smallest factor from 1 to ``high`` that holds, to a twentieth of it; ``high`` is known to."""
    low = 1.0
    while high - low > 0.05 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
