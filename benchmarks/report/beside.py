"""Sections of the page that set figures beside one another: other systems, replicas at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import LAYOUTS
from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import BENCH_DECODE, BENCH_PREFILL, Layout, Record
from antiphon.benchmarks.report.markdown import marked, short, table
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.prices import Figure, figure
from antiphon.benchmarks.sweep.replicas import AT_ONCE

PEERS_HEAD = """## Beside other systems

Prefill is one prompt to its first token, decode one step of a batch. A ratio above 1 says that the peer takes
longer; one with a predicted figure of ours is in italics. Points with a date were measured by `antiphon bench
beside`: both on the same GPUs in the same run, with the same weights and prompts. The others were measured
apart (`benchmarks/results/peers.json`): there each of our layouts that was measured over as many GPUs has a
row, and of several ways in which a peer can run its experts the fastest one counts. A layout behind the
peer's name is its own where it is another than ours.
"""
REPLICAS_HEAD = """## Replicas at the same time

Whole replicas of a layout, each on GPUs of its own, measuring the same point at once: what DP costs one of
them.
"""


def peer_section(
    models: Sequence[CostModel], measured: Sequence[Record], pairs: Sequence[Record] = ()
) -> str:
    """Every measured figure of a peer beside ours of the same point; says so when there is none.

    Args:
        pairs: ours that hold a peer's figure of the same run, which go before those measured apart.
    """
    rows = []
    for model in models:
        together = {
            (point_of(pair), pair.beside.system): (pair, pair.beside)
            for pair in pairs
            if pair.beside is not None and pair.model == model.model and model.gpu.name in pair.device
        }
        # A figure of theirs that belongs to a pair is not one that was measured apart, whatever its layout.
        paired = {
            (replace(point, layout=Layout.parse(theirs.layout)), peer)
            for (point, peer), (_, theirs) in together.items()
        }
        apart = {
            (point, peer): seconds
            for point, peer, seconds in _peer_points(model, measured)
            if (point, peer) not in together and (point, peer) not in paired
        }
        for point, peer in sorted({*together, *apart}, key=_order):
            if (point, peer) in together:
                pair, theirs = together[point, peer]
                over = "" if theirs.layout == pair.layout else f" ({theirs.layout})"
                rows.append(
                    [
                        model.model,
                        point.layout.name,
                        _what(point),
                        "–" if pair.floor is None else short(pair.floor),
                        short(pair.value),
                        short(theirs.value),
                        f"{theirs.value / pair.value:.2f}",
                        peer + over,
                        pair.date[:10],
                    ]
                )
                continue
            for ours in _ours_beside(point, model, measured):
                same = ours.point.layout == point.layout
                floor_ms = (same and _floor_ms(measured, point, peer)) or _least_ms(model, ours.point)
                peer_ms = apart[point, peer] * 1e3
                rows.append(
                    [
                        model.model,
                        ours.point.layout.name,
                        _what(point),
                        short(floor_ms),
                        marked(short(ours.seconds * 1e3), ours.measured, ours.holds_fp8),
                        short(peer_ms),
                        marked(f"{peer_ms / ours.seconds / 1e3:.2f}", ours.measured),
                        peer if same else f"{peer} ({point.layout.name})",
                        "apart",
                    ]
                )
    if not rows:
        return PEERS_HEAD + "\nNo other system has been measured yet."
    head = ["model", "layout", "point", "floor ms", "ours ms", "peer ms", "peer / ours", "peer", "measured"]
    return PEERS_HEAD + "\n" + table(head, rows)


def _ours_beside(point: Point, model: CostModel, measured: Sequence[Record]) -> list[Figure]:
    """Ours of every layout measured over as many GPUs; where none was, predicted, of the same layout."""
    layouts = [layout for layout in LAYOUTS if layout.gpus == point.layout.gpus]
    found = [figure(replace(point, layout=layout), model, measured, 1.0) for layout in layouts]
    return [each for each in found if each.measured] or [figure(point, model, measured, 1.0)]


def point_of(record: Record) -> Point:
    """What a record of a prompt or a decode step is the figure of."""
    layout = Layout.parse(record.layout)
    batch = record.batch if record.bench == BENCH_DECODE else None
    return Point(record.bench, record.model, layout, record.input_tokens, batch, record.context)


def _order(found: tuple[Point, str]) -> tuple[object, ...]:
    point, peer = found
    kind = {BENCH_PREFILL: 0, BENCH_DECODE: 1}[point.bench]
    where = (point.layout.gpus, point.layout.name, kind)
    return *where, point.input_tokens or 0, point.context or 0, point.batch or 0, peer


def replica_section(models: Sequence[CostModel], measured: Sequence[Record]) -> str:
    """Measured DP layouts beside one replica; empty when there are none."""
    rows = []
    for model in models:
        for record in measured:
            layout = Layout.parse(record.layout)
            if record.model != model.model or layout.dp == 1 or model.gpu.name not in record.device:
                continue
            one = Point(
                record.bench,
                model.model,
                Layout(layout.tp, layout.ep),
                record.input_tokens,
                record.batch,
                record.context,
            )
            if record.bench == BENCH_PREFILL:
                one = Point(record.bench, model.model, Layout(layout.tp, layout.ep), record.input_tokens)
            alone = figure(one, model, [each for each in measured if AT_ONCE not in each.extra], 1.0)
            if alone.measured and alone.holds_fp8 == record.holds_fp8:
                rows.append(
                    [
                        model.model,
                        layout.name,
                        _what(one),
                        short(alone.seconds * 1e3),
                        short(record.value),
                        f"{record.value * 1e-3 / alone.seconds - 1:+.1%}",
                    ]
                )
    if not rows:
        return ""
    head = ["model", "layout", "point of one replica", "alone ms", "slowest of all ms", "difference"]
    return REPLICAS_HEAD + "\n" + table(head, rows)


def _peer_points(model: CostModel, measured: Sequence[Record]) -> list[tuple[Point, str, float]]:
    """(point, peer, seconds) of each point that a peer was measured at on this GPU, its fastest way."""
    best: dict[tuple[Point, str], float] = {}
    for record in measured:
        if record.peer is None or record.model != model.model or model.gpu.name not in record.device:
            continue
        if record.bench not in (BENCH_PREFILL, BENCH_DECODE):
            continue
        key = point_of(record), record.peer
        best[key] = min(best.get(key, float("inf")), record.value * 1e-3)
    return [(point, peer, seconds) for (point, peer), seconds in best.items()]


def _floor_ms(measured: Sequence[Record], point: Point, peer: str) -> float | None:
    floors = [
        record.floor for record in measured if point.measured_by(record, peer) and record.floor is not None
    ]
    return min(floors, default=None)


def _least_ms(model: CostModel, point: Point) -> float:
    least_s = layout_floor_s(model.shape, point.layout, point.input_tokens, point.batch, point.context)
    return least_s * 1e3


def _what(point: Point) -> str:
    if point.input_tokens is not None:
        return f"prompt of {point.input_tokens:,}"
    return f"{point.batch} x {point.context:,}"
