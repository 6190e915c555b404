"""Puts a plan under simulated load: steady and bursty arrivals, equal and mixed lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import Plan, Targets, handover
from antiphon.benchmarks.plan.simulation import Cluster, Outcome, Simulation, StepTime, requests_at
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.serve.arrivals import Arrivals, GammaGaps, Modulated
from antiphon.benchmarks.serve.lengths import Fixed, Lengths, LogNormal
from antiphon.benchmarks.serve.statistics import Summary

MOST_REQUESTS = 200_000
"""Requests of one scenario: of a large load a shorter time says as much."""
GROWTH_REQUESTS = 20_000
"""Requests of one simulation while a larger plan is looked for."""
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
    warmup_s: float = 30.0,
    seed: int = 0,
) -> list[Checked]:
    """Simulate the scenarios; of loads of many requests a second, a shorter time than asked for."""
    targets = plan.targets
    enough_s = max(2 * warmup_s, MOST_REQUESTS / targets.requests_per_s)
    duration_s = min(duration_s, enough_s)
    cluster = cluster_of(model, plan)
    found = []
    for scenario in scenarios:
        inputs, outputs = _lengths(targets, scenario.mixed)
        times = scenario.arrivals(targets.requests_per_s).times(random.Random(seed))
        requests = requests_at(times, duration_s, inputs.draw, outputs.draw, seed)
        outcome = Simulation(cluster, warmup_s).run(requests)
        ttft_s, itl_s = (
            at_quantile(outcome.ttft, targets.quantile),
            at_quantile(outcome.itl, targets.quantile),
        )
        holds = outcome.requests > 0 and ttft_s <= targets.ttft_s and itl_s <= targets.itl_s
        found.append(Checked(scenario.name, outcome, ttft_s, itl_s, holds))
    return found


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

    First both pools by one factor, then each is cut back on its own. Of large loads less time is simulated.
    """
    enough_s = max(4 * warmup_s, GROWTH_REQUESTS / plan.targets.requests_per_s)

    def holds(candidate: Plan) -> bool:
        length_s = min(duration_s, enough_s)
        return check(model, candidate, scenarios=[scenario], duration_s=length_s, warmup_s=warmup_s)[0].holds

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


def _least_factor(high: float, holds: Callable[[float], bool]) -> float:
    """Smallest factor from 1 to ``high`` that holds, to a twentieth; ``high`` is known to."""
    low = 1.0
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
