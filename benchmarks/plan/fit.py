"""Non-negative least squares of a few terms, and errors on points that a fit has not seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from antiphon.benchmarks.serve.statistics import percentile

Row = tuple[tuple[float, ...], float]
"""(terms of a point, its measured value); all positive or zero."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, as shares of the measured values."""

    points: int
    median: float
    worst: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Errors | None:
        """Of (predicted, measured) pairs; None of none."""
        if not pairs:
            return None
        shares = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
        return cls(len(shares), percentile(shares, 0.5), shares[-1])


def non_negative_fit(rows: Sequence[Row], towards_one: float = 0.0) -> tuple[float, ...]:
    """Coefficients >= 0 that minimise the sum of squared relative errors.

    Exact for few terms: the least squares solution of every subset of the terms is tried, and of those
    without a negative coefficient the best is taken. ``towards_one`` adds that often the square of each
    coefficient's distance from 1, so that few points do not carry terms away that they hardly determine.

    Raises:
        ValueError: there are no rows, or a value is not positive.
    """
    if not rows or any(value <= 0 for _, value in rows):
        raise ValueError("a fit needs points, and values above 0")
    width = len(rows[0][0])
    scaled = [(tuple(term / value for term in terms), 1.0) for terms, value in rows]
    if towards_one > 0:
        weight = math.sqrt(towards_one)
        scaled += [(tuple(weight * (i == j) for j in range(width)), weight) for i in range(width)]
    moments = _moments(scaled, width)
    free = _least_squares(moments, tuple(range(width)))
    if free is not None and all(each >= 0 for each in free):
        return free  # nothing better is without a negative coefficient
    best: tuple[float, tuple[float, ...]] | None = None
    for size in range(width + 1):
        for subset in itertools.combinations(range(width), size):
            found = _least_squares(moments, subset)
            if found is None or any(each < 0 for each in found):
                continue
            full = [0.0] * width
            for index, each in zip(subset, found, strict=True):
                full[index] = each
            cost = sum((_dot(full, terms) - target) ** 2 for terms, target in scaled)
            if best is None or cost < best[0] - 1e-12:
                best = cost, tuple(full)
    if best is None:  # the empty subset always counts
        raise ValueError("no fit")
    return best[1]


def leave_one_out(rows: Sequence[Row], towards_one: float = 0.0) -> Errors | None:
    """Each point predicted by a fit to all the others; None of fewer than three points."""
    if len(rows) < 3:
        return None
    pairs = []
    for index, (terms, value) in enumerate(rows):
        coefficients = non_negative_fit([*rows[:index], *rows[index + 1 :]], towards_one)
        pairs.append((_dot(coefficients, terms), value))
    return Errors.of(pairs)


def _dot(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


def _moments(rows: Sequence[Row], width: int) -> list[list[float]]:
    """The normal equations of all terms: [width][width + 1], the right side last."""
    columns = [[terms[index] for terms, _ in rows] for index in range(width)]
    columns.append([target for _, target in rows])
    return [[math.fsum(map(mul, columns[i], column)) for column in columns] for i in range(width)]


def _least_squares(moments: Sequence[Sequence[float]], subset: tuple[int, ...]) -> tuple[float, ...] | None:
    """Coefficients of a subset of the terms; None when they are not determined."""
    matrix = [[moments[i][j] for j in subset] + [moments[i][-1]] for i in subset]
    size = len(subset)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) < 1e-18:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for other in range(size):
            if other != column:
                factor = matrix[other][column] / matrix[column][column]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[column], strict=True)]
    return tuple(matrix[i][size] / matrix[i][i] for i in range(size))
