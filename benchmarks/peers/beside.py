"""``antiphon bench beside``: ours and another system's, each point on the same GPUs in the same run.

Each model and layout has its GPUs to itself: this project is measured there, then the other system, with the
same weights and prompts. Models of one GPU each run side by side. What is kept of a point that both were
measured at is our record with the other's figure in it, and the other's own record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from antiphon.benchmarks.peers.command import GRACE_S
from antiphon.benchmarks.peers.meter import PeerOpener, PeerSystem, Weights, find_peer
from antiphon.benchmarks.peers.pairs import joined
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import Layout, Record, append_records, load_records, now
from antiphon.benchmarks.sweep import lanes
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete
from antiphon.benchmarks.sweep.meter import DeviceType, Effort, OpenMeter, devices_here, remote_opener
from antiphon.benchmarks.sweep.points import Point, grid
from antiphon.benchmarks.sweep.run import Outcome, run_sweep
from antiphon.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared with what, and how long that may take."""

    system: tuple[str, str]
    """Name of the other system, and the interpreter that has it."""
    sizes: dict[str, Sequence[Sizes]]
    """Points by model."""
    layouts: tuple[str, ...] = ("TP1",)
    """``OURS=THEIRS`` where the other system has another one over as many GPUs, such as ``TP2 EP2=TP2``."""
    effort: Effort = field(default_factory=Effort)
    peer_chunk_tokens: int = 32768
    """Prompt tokens of a step of the other system, which may be best at another size than ours."""
    weights: Weights = "synthesized"
    device: DeviceType = "cuda"
    devices: int | None = None
    """All there are when absent."""
    seconds: float = math.inf
    """After so long no point is begun; the next run goes on."""
    logs: Path | None = None
    """Folder that keeps what the other system says."""


def run_command(comparison: Comparison, output: Path) -> None:
    """Measure what ``output`` holds no pair of yet, then print all that it holds.

    Raises:
        PeerMissing: the other system is not installed.
        SweepIncomplete: points failed or are left; what was measured is kept.
        ConfigError, NotMeasurable: a layout takes more devices than there are.
    """
    run = _Run(comparison, find_peer(*comparison.system), output)
    layouts = [_both(layout) for layout in comparison.layouts]
    jobs = [run.job(model, *both) for both in layouts for model in comparison.sizes]
    try:
        lanes.run_at_once(jobs, comparison.devices or devices_here(comparison.device))
    finally:
        print_pairs(load_records(output))
    total = run.outcome
    if total.failed:
        point, reason = total.failed[0]
        raise SweepIncomplete(f"{len(total.failed)} points failed, the first {point.name}: {reason}")
    if total.left:
        raise SweepIncomplete(f"{len(total.left)} points are left for the next run")


class _Run:
    """One run: only what was measured in it becomes a pair."""

    def __init__(self, comparison: Comparison, system: PeerSystem, output: Path) -> None:
        self._comparison, self._system, self._output = comparison, system, output
        self._end = time.monotonic() + comparison.seconds
        self._begun = now()
        self._console = Console(stderr=True)
        self.outcome = Outcome()

    def job(self, model: str, layout: Layout, over: Layout) -> lanes.Job:
        """One model in one layout: ours, then the other system's in its own, on the same devices."""
        comparison, cost = self._comparison, build(model, [])
        points = [
            point
            for each in comparison.sizes[model]
            for point in grid(cost, [layout], each.input_tokens, each.batches, each.contexts).points
        ]

        def run(numbers: tuple[int, ...]) -> None:
            label, known = self._system.label, load_records(self._output)
            same = label, over.name
            paired = [
                each for each in known if each.beside and (each.beside.system, each.beside.layout) == same
            ]
            wanted = [point for point in points if not any(map(point.measured_by, paired))]
            if not wanted:
                return
            self._sweep(wanted, remote_opener(comparison.device, comparison.effort, numbers), None)
            theirs = PeerOpener(
                self._system,
                replace(comparison.effort, chunk_tokens=comparison.peer_chunk_tokens),
                {},
                comparison.weights,
                self._end + GRACE_S,
                numbers if comparison.device == "cuda" else (),
                comparison.logs,
            )
            self._sweep([replace(point, layout=over) for point in wanted], theirs, label, layout)

        return lanes.Job(f"{model} {layout.name}", layout.gpus, run)

    def _sweep(
        self, points: Sequence[Point], opener: OpenMeter, peer: str | None, ours_over: Layout | None = None
    ) -> None:
        def on_point(point: Point, result: str) -> None:
            who = peer or "this project"
            self._console.print(f"{who}, {point.name}: {result}", markup=False, highlight=False)
            if peer is not None and ours_over is not None:
                here = [each for each in load_records(self._output) if each.date >= self._begun]
                ours = replace(point, layout=ours_over)
                append_records(self._output, joined(here, peer, ours, point.layout))

        part = run_sweep(
            points,
            opener,
            self._output,
            again=True,
            on_point=on_point,
            peer=peer,
            time_is_over=lambda: time.monotonic() > self._end,
        )
        self.outcome.add(part)


def _both(text: str) -> tuple[Layout, Layout]:
    """Ours and theirs.

    Raises:
        ConfigError: over different numbers of GPUs.
        RecordError: one is no layout.
    """
    ours, _, theirs = text.partition("=")
    both = Layout.parse(ours), Layout.parse(theirs or ours)
    if both[0].gpus != both[1].gpus:
        raise ConfigError(f"layouts {text!r}: {both[0].gpus} and {both[1].gpus} GPUs")
    return both


def print_pairs(records: Sequence[Record]) -> None:
    """A line for each of ours that has another system's figure."""
    table = Table("model", "layout", "point", "floor ms", "ours ms", "theirs ms", "theirs / ours", "system")
    for each in records:
        if each.beside is None:
            continue
        prompt = each.input_tokens is not None
        what = f"prompt of {each.input_tokens}" if prompt else f"{each.batch} x {each.context}"
        table.add_row(
            each.model,
            each.layout,
            what,
            "" if each.floor is None else f"{each.floor:.2f}",
            f"{each.value:.3f}",
            f"{each.beside.value:.3f}",
            f"{each.beside.value / each.value:.2f}",
            f"{each.beside.system} {each.beside.layout}",
        )
    Console(width=120).print(table)
