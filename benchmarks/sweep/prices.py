"""Prices of measured and predicted figures, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    holds_fp8: bool = False
    """Measured where FP8 experts lay beside the 4-bit ones, as workers hold them only when they are told."""

    @property
    def tokens_per_s_user(self) -> float:
        """Decode: tokens per second that one user gets."""
        return 1 / self.seconds


def figure(point: Point, model: CostModel, measured: Sequence[Record], gpu_hour_price: float) -> Figure:
    """The measured figure of a point where there is one on the model's GPU, the predicted one otherwise."""
    here = [record for record in measured if model.gpu.name in record.device]
    known = measured_figure(point, here, gpu_hour_price)
    if known is not None:
        return known
    return _priced(point, predicted_s(point, model), False, gpu_hour_price)


def measured_figure(point: Point, measured: Sequence[Record], gpu_hour_price: float) -> Figure | None:
    """The measured figure of a point on whatever device; None when there is none.

    One of a worker that was told to hold FP8 experts counts where there is none of a worker's defaults.
    """
    mine = [record for record in measured if point.names(record) and not record.choices]
    for holds_fp8 in (False, True):
        times = [record.value * 1e-3 for record in mine if record.holds_fp8 == holds_fp8]
        if times:
            return replace(_priced(point, min(times), True, gpu_hour_price), holds_fp8=holds_fp8)
    return None


def _priced(point: Point, seconds: float, measured: bool, gpu_hour_price: float) -> Figure:
    tokens = (point.input_tokens if point.bench == BENCH_PREFILL else point.batch) or 1
    price = price_per_million(point.layout.gpus, gpu_hour_price, tokens * point.layout.dp / seconds)
    return Figure(point, seconds, measured, price)


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
