"""``antiphon bench sweep``: measure every layout that fits the devices of this machine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import BENCH_DECODE, Layout, load_results
from antiphon.benchmarks.report.markdown import step_errors
from antiphon.benchmarks.sweep.meter import (
    DeviceType,
    Effort,
    NotMeasurable,
    OpenMeter,
    devices_here,
    engine_opener,
    remote_opener,
)
from antiphon.benchmarks.sweep.points import BATCHES, CONTEXTS, INPUT_TOKENS, Point, grid, layouts_for
from antiphon.benchmarks.sweep.prices import measured_figure, pareto_front
from antiphon.benchmarks.sweep.run import OnPoint, Outcome, run_sweep, run_sweep_at_once
from antiphon.protocol.errors import AntiphonError


class SweepIncomplete(AntiphonError):
    """Points could not be measured; they were named, and what was measured is kept."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured of each layout."""

    input_tokens: Sequence[int] = INPUT_TOKENS
    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS


def run_command(
    models: Sequence[str],
    output: Path,
    *,
    layouts: Sequence[str] = (),
    gpu_hour_price: float = 3.0,
    again: bool = False,
    device: DeviceType = "cuda",
    ranks: int | None = None,
    sizes: Sizes | None = None,
    effort: Effort | None = None,
    docs: Path | None = None,
    open_meter: OpenMeter | None = None,
    seconds: float = math.inf,
    at_once: bool = False,
) -> None:
    """Measure, then print prices and the Pareto front of what was measured, and write the page of results.

    ``ranks`` narrows the devices that layouts may take; all there are when absent. After ``seconds`` no point
    is begun; the next run goes on with what is left. ``at_once`` measures as many models and layouts at the
    same time as there are devices for, each in processes of its own.

    Raises:
        NotMeasurable: there is no device, or a layout that was asked for needs more than there are.
        SweepIncomplete: some points failed or are left; the page is written first.
        ConfigError, RecordError: a model or a file is not what it should be.
    """
    available = devices_here(device) if ranks is None else ranks
    chosen = [Layout.parse(each) for each in layouts] or layouts_for(available)
    if too_large := [each.name for each in chosen if each.gpus > available]:
        raise NotMeasurable(f"{', '.join(too_large)}: there are {available} devices here")
    wanted = sizes or Sizes()
    grids = [
        grid(build(model, []), chosen, wanted.input_tokens, wanted.batches, wanted.contexts)
        for model in models
    ]
    points = [point for each in grids for point in each.points]
    console = Console(stderr=True)
    for each in grids:
        for point, why in each.left_out:
            console.print(f"left out {point.name}: {why}", style="dim", markup=False)
    opener = open_meter or engine_opener(device, effort or Effort())
    end = time.monotonic() + seconds

    def open_on(numbers: tuple[int, ...]) -> OpenMeter:
        return opener if open_meter is not None else remote_opener(device, effort or Effort(), numbers)

    def measure(on_point: OnPoint) -> Outcome:
        def over() -> bool:
            return time.monotonic() > end

        if at_once:
            return run_sweep_at_once(
                points,
                open_on,
                output,
                devices=available,
                again=again,
                on_point=on_point,
                time_is_over=over,
            )
        return run_sweep(points, opener, output, again=again, on_point=on_point, time_is_over=over)

    outcome = _with_progress(len(points), measure, console)
    _print_prices(models, output.parent, points, gpu_hour_price)
    _print_errors(models, output.parent)
    print(
        f"{len(outcome.measured)} measured, {len(outcome.known)} known before, {len(outcome.failed)} failed, "
        f"{len(outcome.left)} left"
    )
    if docs is not None:
        from antiphon.benchmarks.report.page import write

        for path in write(docs, output.parent, gpu_hour_price):
            print(path)
    if outcome.failed:
        point, reason = outcome.failed[0]
        raise SweepIncomplete(f"{len(outcome.failed)} points failed, the first {point.name}: {reason}")
    if outcome.left:
        raise SweepIncomplete(f"{len(outcome.left)} points are left for the next run")


def _with_progress(points: int, measure: Callable[[OnPoint], Outcome], console: Console) -> Outcome:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=points)

        def on_point(point: Point, result: str) -> None:
            progress.update(task, advance=1, description=point.name)
            if result != "known":
                progress.console.print(f"{point.name}: {result}", markup=False)

        return measure(on_point)


def _print_errors(models: Sequence[str], folder: Path) -> None:
    """What the cost model makes of the figures: errors on points and layouts that its fit has not seen."""
    model = build(models[0], load_results(folder))
    if not (model.decode_correction.points or model.prefill_correction.points):
        return  # no figures of this GPU, or too few
    table = Table("whole steps", "predicted", "points", "median error", "worst")
    for row in step_errors(model):
        table.add_row(*row)
    Console().print(table)


def _print_prices(
    models: Sequence[str], folder: Path, points: Sequence[Point], gpu_hour_price: float
) -> None:
    measured = load_results(folder)
    console = Console()
    for name in models:
        decode = [p for p in points if p.model == name and p.bench == BENCH_DECODE]
        figures = [measured_figure(point, measured, gpu_hour_price) for point in decode]
        for context in sorted({point.context or 0 for point in decode}):
            known = [each for each in figures if each is not None and each.point.context == context]
            if not known:
                continue
            table = Table(
                "layout", "batch", "tokens/s per user", "$/M output", title=f"{name}, {context}: Pareto front"
            )
            for each in pareto_front(known):
                speed, price = f"{each.tokens_per_s_user:.1f}", f"{each.price_per_million:.3f}"
                table.add_row(each.point.layout.name, str(each.point.batch), speed, price)
            console.print(table)
