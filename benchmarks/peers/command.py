"""``antiphon bench peers``: other systems on this machine, with the same shapes, prompts and weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from antiphon.benchmarks.peers.meter import PeerMissing, PeerOpener, find_peer
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete
from antiphon.benchmarks.sweep.meter import Effort
from antiphon.benchmarks.sweep.points import Point, grid
from antiphon.benchmarks.sweep.run import run_sweep


def run_command(
    peers: Sequence[tuple[str, str]],
    models: Sequence[str],
    output: Path,
    *,
    layouts: Sequence[str],
    sizes: Sizes,
    effort: Effort,
    checkpoints: dict[str, Path],
    again: bool = False,
) -> None:
    """Measure each (name, interpreter) that is installed; one that is not is skipped with a message.

    Raises:
        SweepIncomplete: points failed; what was measured is kept.
    """
    console = Console(stderr=True)
    chosen = [Layout.parse(each) for each in layouts]
    points = [
        point
        for model in models
        for point in grid(build(model, []), chosen, sizes.input_tokens, sizes.batches, sizes.contexts).points
    ]
    failed: list[tuple[Point, str]] = []
    for name, python in peers:
        try:
            system = find_peer(name, python)
        except PeerMissing as error:
            console.print(str(error), style="yellow", markup=False)
            continue

        def on_point(point: Point, result: str, label: str = system.label) -> None:
            console.print(f"{label}, {point.name}: {result}", markup=False, highlight=False)

        opener = PeerOpener(system, effort, checkpoints)
        outcome = run_sweep(points, opener, output, again=again, on_point=on_point, peer=system.label)
        failed += outcome.failed
    if failed:
        point, reason = failed[0]
        raise SweepIncomplete(f"{len(failed)} points failed, the first {point.name}: {reason}")
