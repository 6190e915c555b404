"""Percentiles and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one quantity, in its own unit; every field is None when nothing was observed."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Quantile of ascending values, linear between the two nearest ranks (Hyndman and Fan's type 7)."""
    if not ordered:
        raise ValueError("no values")
    position = (len(ordered) - 1) * quantile
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(values: Sequence[float]) -> Summary:
    """Mean, percentiles and maximum."""
    if not values:
        return Summary(0, None, None, None, None, None, None)
    ordered = sorted(values)
    p50, p90, p95, p99 = (percentile(ordered, q) for q in QUANTILES)
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])
