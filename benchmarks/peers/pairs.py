"""Figures of this project that hold another system's of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.benchmarks.records import RESULTS, Layout, PeerFigure, Record, read_json
from antiphon.benchmarks.sweep.points import Point


def joined(
    records: Sequence[Record], peer: str, point: Point, theirs_over: Layout | None = None
) -> list[Record]:
    """Our records of a point, each with the figure of ``peer`` from the same kind of device.

    Args:
        theirs_over: the layout of ``peer`` where it is not that of the point.
    """
    their_point = point if theirs_over is None else replace(point, layout=theirs_over)
    found = []
    for ours in filter(point.measured_by, records):
        theirs = [
            each
            for each in records
            if their_point.measured_by(each, peer) and (each.device, each.unit) == (ours.device, ours.unit)
        ]
        if theirs:
            best = min(theirs, key=lambda each: each.value)
            found.append(replace(ours, beside=PeerFigure(peer, best.value, best.date, best.layout)))
    return found


def load_pairs(folder: Path = RESULTS) -> list[Record]:
    """Records of ``folder`` that hold another system's figure of the same run, the latest of each point.

    ``load_results`` may hold a later one of ours instead, which was measured without the other system.

    Raises:
        RecordError: as ``load_results``.
    """
    latest: dict[tuple[object, ...], Record] = {}
    for path in sorted(folder.glob("*.json")):
        entries = read_json(path)
        pairs = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        for index, entry in enumerate(pairs):
            if not isinstance(entry.get("peer"), dict) or "layout" not in entry:
                continue
            record = Record.from_json(entry, f"{path}, pair {index}")
            system = "" if record.beside is None else record.beside.system
            known = latest.get((*record.point, system))
            if known is None or known.date <= record.date:
                latest[*record.point, system] = record
    return list(latest.values())
