"""Who serves more good requests within which limit: the colocated engines with their best chunk for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.benchmarks.split.arrangements import COLOCATED, SPLIT
from antiphon.benchmarks.split.observed import Best, LoadRun, best_within


@dataclass(frozen=True, slots=True)
class Row:
    """One arrangement under one limit."""

    itl_ms: float
    arrangement: str
    peer: bool
    best: Best | None
    """None when no load was served well enough."""
    against_split: float | None
    """Its goodput over the split's; None for the split itself, or where the split serves nothing."""

    @property
    def label(self) -> str:
        """The arrangement, with the chunk that this limit chose."""
        chunk = None if self.best is None else self.best.run.chunk_tokens
        name = self.arrangement if chunk is None else f"{self.arrangement}, chunk {chunk}"
        return f"{name} (peer)" if self.peer else name


def comparison(
    runs: Sequence[LoadRun], ttft_ms: float, itl_ms: Sequence[float], attainment: float
) -> list[Row]:
    """A row for each limit and arrangement of one model, device and mix; the split first."""
    names = sorted(
        {run.arrangement for run in runs}, key=lambda name: (name != SPLIT, name != COLOCATED, name)
    )
    rows = []
    for limit in sorted(itl_ms):
        bests = {
            name: best_within((r for r in runs if r.arrangement == name), ttft_ms, limit, attainment)
            for name in names
        }
        split = bests.get(SPLIT)
        for name, best in bests.items():
            ratio = None
            if name != SPLIT and split is not None:
                ratio = (0.0 if best is None else best.good_per_s) / split.good_per_s
            peer = any(run.peer for run in runs if run.arrangement == name)
            rows.append(Row(limit, name, peer, best, ratio))
    return rows


def curve(
    runs: Sequence[LoadRun], arrangement: str, ttft_ms: float, itl_ms: Sequence[float], attainment: float
) -> list[tuple[float, float]]:
    """(ITL limit in ms, goodput per second) of one arrangement, 0 where it serves no load well enough."""
    mine = [run for run in runs if run.arrangement == arrangement]
    points = []
    for limit in itl_ms:
        best = best_within(mine, ttft_ms, limit, attainment)
        points.append((limit, 0.0 if best is None else best.good_per_s))
    return points


def sentence(mix: str, rows: Sequence[Row]) -> str:
    """In words, for one mix: under which limits the split serves more, as much and fewer than colocated."""
    parts = []
    by_limit = {row.itl_ms: {r.arrangement: r for r in rows if r.itl_ms == row.itl_ms} for row in rows}
    for limit, arrangements in by_limit.items():
        if SPLIT not in arrangements or COLOCATED not in arrangements:
            continue
        split, both = arrangements[SPLIT].best, arrangements[COLOCATED].best
        if split is None and both is None:
            parts.append(f"at {limit:g} ms neither serves any load")
        elif split is None:
            parts.append(f"at {limit:g} ms **the split loses**: it serves no load, colocated engines do")
        elif both is None:
            parts.append(f"at {limit:g} ms only the split serves")
        else:
            ratio = split.good_per_s / both.good_per_s
            loses = "**the split loses**, serving" if ratio < 1 else "the split serves"
            parts.append(f"at {limit:g} ms {loses} {ratio:.2f} times what colocated engines do")
    return f"{mix}: {'; '.join(parts)}." if parts else f"{mix}: not compared yet."
