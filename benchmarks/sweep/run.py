"""Runs a sweep: skips what is known, keeps every figure as soon as it is there, goes on after a failure."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.benchmarks.records import Layout, Record, append_records, load_records, now
from antiphon.benchmarks.sweep import lanes
from antiphon.benchmarks.sweep.meter import MeasuresMore, Meter, OpenMeter
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.replicas import AT_ONCE
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

    def add(self, other: Outcome) -> None:
        """What another part of the sweep did."""
        self.measured += other.measured
        self.known += other.known
        self.failed += other.failed
        self.left += other.left


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


def run_sweep_at_once(
    points: Sequence[Point],
    open_on: Callable[[tuple[int, ...]], OpenMeter],
    output: Path,
    *,
    devices: int,
    again: bool = False,
    on_point: OnPoint,
    time_is_over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """As ``run_sweep``, with as many models and layouts at the same time as there are devices for.

    ``open_on`` opens meters on the devices of these numbers, in processes of their own. Replicas that measure
    at the same time go first, since they bring the figures of one replica along; then layouts in the order in
    which they appear, each for all models.

    Raises:
        ConfigError: a layout takes more devices than there are.
    """
    outcome, lock, begun = Outcome(), threading.Lock(), now()
    groups: dict[tuple[str, Layout], list[Point]] = {}
    for point in points:
        groups.setdefault((point.model, point.layout), []).append(point)

    def job(mine: list[Point]) -> lanes.Job:
        layout = mine[0].layout

        def run(numbers: tuple[int, ...]) -> None:
            # What came along with replicas a moment ago is not measured again, even with ``again``.
            here = [point for point in mine if not _came_along(point, output, begun)]
            for point in set(mine) - set(here):
                on_point(point, "known")
            part = run_sweep(
                here, open_on(numbers), output, again=again, on_point=on_point, time_is_over=time_is_over
            )
            with lock:
                outcome.add(part)

        return lanes.Job(f"{mine[0].model} {layout.name}", layout.gpus, run)

    order = list(dict.fromkeys(layout for _, layout in groups))
    order.sort(key=lambda layout: layout.dp == 1)  # stable
    found = sorted(groups.items(), key=lambda item: order.index(item[0][1]))
    lanes.run_at_once([job(mine) for _, mine in found], devices)
    return outcome


def _came_along(point: Point, output: Path, begun: str) -> bool:
    return any(
        point.measured_by(record) and AT_ONCE in record.extra and record.date >= begun
        for record in load_records(output)
    )


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
        figures = [record, *(meter.came_along() if isinstance(meter, MeasuresMore) else ())]
        append_records(output, figures)
        outcome.measured += figures
        on_point(point, f"{record.value:.3f} {record.unit}")


def _fail(outcome: Outcome, point: Point, error: BaseException, on_point: OnPoint) -> None:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    outcome.failed.append((point, reason))
    on_point(point, f"failed: {reason}")


def _failures() -> tuple[type[Exception], ...]:
    """What one point may fail with while the others can go on; anything else is a fault of the program."""
    import torch

    return (AntiphonError, torch.OutOfMemoryError)
