"""Sections of the page that set figures beside one another: other systems, replicas at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.records import BENCH_DECODE, BENCH_PREFILL, Layout, Record
from antiphon.benchmarks.report.markdown import marked, short, table
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.prices import figure
from antiphon.benchmarks.sweep.replicas import AT_ONCE

PEERS_HEAD = """## Beside other systems

Prefill is one prompt to its first token, decode one step of a batch. Of several ways in which a peer can run
its experts the fastest one counts. A ratio above 1 says that the peer takes longer; one with a predicted
figure of ours is in italics. Peer figures keep their own origin in `benchmarks/results/peers.json`.
"""
REPLICAS_HEAD = """## Replicas at the same time

Whole replicas of a layout, each on GPUs of its own, measuring the same point at once: what DP costs one of
them.
"""


def peer_section(models: Sequence[CostModel], measured: Sequence[Record]) -> str:
    """Every measured figure of a peer beside ours of the same point; says so when there is none."""
    rows = []
    for model in models:
        for point, peer, peer_s in _peer_points(model, measured):
            ours = figure(point, model, measured, 1.0)
            floor_ms = _floor_ms(measured, point, peer)
            rows.append(
                [
                    model.model,
                    point.layout.name,
                    _what(point),
                    "–" if floor_ms is None else short(floor_ms),
                    marked(short(ours.seconds * 1e3), ours.measured),
                    short(peer_s * 1e3),
                    marked(f"{peer_s / ours.seconds:.2f}", ours.measured),
                    peer,
                ]
            )
    if not rows:
        return PEERS_HEAD + "\nNo other system has been measured yet."
    head = ["model", "layout", "point", "floor ms", "ours ms", "peer ms", "peer / ours", "peer"]
    return PEERS_HEAD + "\n" + table(head, rows)


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
            if alone.measured:
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
        batch = record.batch if record.bench == BENCH_DECODE else None
        point = Point(
            record.bench,
            record.model,
            Layout.parse(record.layout),
            record.input_tokens,
            batch,
            record.context,
        )
        key = point, record.peer
        best[key] = min(best.get(key, float("inf")), record.value * 1e-3)
    order = {BENCH_PREFILL: 0, BENCH_DECODE: 1}
    found = [(point, peer, seconds) for (point, peer), seconds in best.items()]
    return sorted(
        found,
        key=lambda f: (
            f[0].layout.gpus,
            f[0].layout.name,
            order[f[0].bench],
            f[0].input_tokens or 0,
            f[0].context or 0,
            f[0].batch or 0,
            f[1],
        ),
    )


def _floor_ms(measured: Sequence[Record], point: Point, peer: str) -> float | None:
    floors = [
        record.floor for record in measured if point.measured_by(record, peer) and record.floor is not None
    ]
    return min(floors, default=None)


def _what(point: Point) -> str:
    if point.input_tokens is not None:
        return f"prompt of {point.input_tokens:,}"
    return f"{point.batch} x {point.context:,}"
