"""Runs a sweep: skips what is known, keeps every figure as soon as it is there, goes on after a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.benchmarks.records import Record, append_records, load_records
from antiphon.benchmarks.sweep.meter import Meter, OpenMeter
from antiphon.benchmarks.sweep.points import Point
from antiphon.protocol.errors import AntiphonError

OnPoint = Callable[[Point, str], None]
"""Called with (point, what came of it)."""


@dataclass(slots=True)
class Outcome:
    """What a sweep did."""

    measured: list[Record] = field(default_factory=list)
    known: list[Point] = field(default_factory=list)
    failed: list[tuple[Point, str]] = field(default_factory=list)
    left: list[Point] = field(default_factory=list)
    """Not begun, since the time was over."""


def run_sweep(
    points: Sequence[Point],
    open_meter: OpenMeter,
    output: Path,
    *,
    again: bool = False,
    on_point: OnPoint,
    peer: str | None = None,
    time_is_over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Measure the points whose figure ``output`` does not hold yet; all of them with ``again``.

    ``peer`` is whose figures they are, when not this project's. Once ``time_is_over`` no point is begun.

    A model is loaded once per layout. A layout or point that cannot be measured is a failure in the outcome,
    and the others are measured all the same.
    """
    outcome = Outcome()
    before = [] if again else load_records(output)
    wanted: list[Point] = []
    for point in points:
        if any(point.measured_by(record, peer) for record in before):
            outcome.known.append(point)
            on_point(point, "known")
        else:
            wanted.append(point)
    for (model, layout), group in itertools.groupby(wanted, key=lambda p: (p.model, p.layout)):
        mine = list(group)
        if time_is_over():
            outcome.left += mine
            continue
        try:
            with open_meter(model, layout, mine) as meter:
                _measure(mine, meter, output, outcome, on_point, time_is_over)
        except _failures() as error:
            done = {*(point for point, _ in outcome.failed), *outcome.left}
            for point in mine:
                if point not in done and not any(point.measured_by(r, peer) for r in outcome.measured):
                    _fail(outcome, point, error, on_point)
    return outcome


def _measure(
    points: Sequence[Point],
    meter: Meter,
    output: Path,
    outcome: Outcome,
    on_point: OnPoint,
    time_is_over: Callable[[], bool],
) -> None:
    for point in points:
        if time_is_over():
            outcome.left.append(point)
            continue
        try:
            record = meter.measure(point)
        except _failures() as error:
            _fail(outcome, point, error, on_point)
            continue
        append_records(output, [record])
        outcome.measured.append(record)
        on_point(point, f"{record.value:.3f} {record.unit}")


def _fail(outcome: Outcome, point: Point, error: BaseException, on_point: OnPoint) -> None:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    outcome.failed.append((point, reason))
    on_point(point, f"failed: {reason}")


def _failures() -> tuple[type[Exception], ...]:
    """What one point may fail with while the others can go on; anything else is a fault of the program."""
    import torch

    return (AntiphonError, torch.OutOfMemoryError)
