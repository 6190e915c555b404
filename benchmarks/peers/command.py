"""``antiphon bench peers``: other systems on this machine, with the same shapes, prompts and weights."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from antiphon.benchmarks.peers.meter import PeerMissing, PeerOpener, Weights, find_peer
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete
from antiphon.benchmarks.sweep.meter import Effort
from antiphon.benchmarks.sweep.points import Point, grid
from antiphon.benchmarks.sweep.run import run_sweep

GRACE_S = 20.0
"""For a point that was begun just before the end."""


def run_command(
    peers: Sequence[tuple[str, str]],
    models: Sequence[str],
    output: Path,
    *,
    layouts: Sequence[str],
    sizes: Sizes,
    effort: Effort,
    checkpoints: dict[str, Path],
    weights: Weights = "synthesized",
    again: bool = False,
    seconds: float = math.inf,
    logs: Path | None = None,
) -> None:
    """Measure each (name, interpreter) that is installed; one that is not is skipped with a message.

    After ``seconds`` no point is begun, and a system that still runs ``GRACE_S`` later is killed. What a
    system says is kept in the folder ``logs``, where there is one.

    Raises:
        SweepIncomplete: points failed or are left; what was measured is kept.
    """
    end = time.monotonic() + seconds
    console = Console(stderr=True)
    chosen = [Layout.parse(each) for each in layouts]
    points = [
        point
        for model in models
        for point in grid(build(model, []), chosen, sizes.input_tokens, sizes.batches, sizes.contexts).points
    ]
    failed: list[tuple[Point, str]] = []
    left: list[Point] = []
    for name, python in peers:
        try:
            system = find_peer(name, python)
        except PeerMissing as error:
            console.print(str(error), style="yellow", markup=False)
            continue

        def on_point(point: Point, result: str, label: str = system.label) -> None:
            console.print(f"{label}, {point.name}: {result}", markup=False, highlight=False)

        outcome = run_sweep(
            points,
            PeerOpener(system, effort, checkpoints, weights, end + GRACE_S, logs=logs),
            output,
            again=again,
            on_point=on_point,
            peer=system.label,
            time_is_over=lambda: time.monotonic() > end,
        )
        failed += outcome.failed
        left += outcome.left
    if failed:
        point, reason = failed[0]
        raise SweepIncomplete(f"{len(failed)} points failed, the first {point.name}: {reason}")
    if left:
        raise SweepIncomplete(f"{len(left)} points are left for the next run")
