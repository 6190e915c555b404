"""Prices of measured and predicted figures, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import price_per_million
from antiphon.benchmarks.records import BENCH_DECODE, BENCH_PREFILL, Layout, Record
from antiphon.benchmarks.sweep.points import Point


@dataclass(frozen=True, slots=True)
class Figure:
    """A point's time, measured or predicted, and what a token costs by it."""

    point: Point
    seconds: float
    measured: bool
    price_per_million: float
    """US dollars per million input (prefill) or output (decode) tokens."""

    @property
    def tokens_per_s_user(self) -> float:
        """Decode: tokens per second that one user gets."""
        return 1 / self.seconds


def figure(point: Point, model: CostModel, measured: Sequence[Record], gpu_hour_price: float) -> Figure:
    """The measured figure of a point where there is one, the predicted one otherwise."""
    # Of several ways to hold the weights, the fastest one is what would be deployed.
    times = [r.value * 1e-3 for r in measured if model.gpu.name in r.device and point.measured_by(r)]
    seconds, known = min(times, default=predicted_s(point, model)), bool(times)
    tokens = point.input_tokens if point.bench == BENCH_PREFILL else point.batch
    price = price_per_million(point.layout.gpus, gpu_hour_price, (tokens or 1) / seconds)
    return Figure(point, seconds, known, price)


def predicted_s(point: Point, model: CostModel) -> float:
    """By the cost model; a prompt's time runs to its first token, as it is measured."""
    if point.bench == BENCH_DECODE:
        return model.decode_step_s(point.layout, point.batch or 1, point.context or 1)
    tokens = point.input_tokens or 1
    return model.prefill_s(point.layout, max(1, tokens - 1)) + model.decode_step_s(point.layout, 1, tokens)


def pareto_front(figures: Iterable[Figure]) -> list[Figure]:
    """Decode figures that no other beats in speed per user at the same price or less; fastest first."""
    ordered = sorted(figures, key=lambda f: (-f.tokens_per_s_user, f.price_per_million))
    front: list[Figure] = []
    for each in ordered:
        if not front or each.price_per_million < front[-1].price_per_million:
            front.append(each)
    return front


def by_layout(figures: Iterable[Figure]) -> dict[Layout, list[Figure]]:
    """Figures of each layout, in the order of their first appearance."""
    grouped: dict[Layout, list[Figure]] = {}
    for each in figures:
        grouped.setdefault(each.point.layout, []).append(each)
    return grouped
