"""Who serves more good requests within which limit: the colocated engines with their best chunk for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.benchmarks.split.arrangements import COLOCATED, SPLIT
from antiphon.benchmarks.split.observed import Best, LoadRun, best_within


@dataclass(frozen=True, slots=True)
class Tried:
    """A load that was not served well enough."""

    rate_per_s: float
    share: float
    """Of requests that kept both limits."""

    def __str__(self) -> str:
        return f"of {self.rate_per_s:g}/s, the least that was tried, {self.share:.0%} kept both limits"


@dataclass(frozen=True, slots=True)
class Row:
    """One arrangement under one limit."""

    itl_ms: float
    arrangement: str
    peer: bool
    best: Best | None
    """None when no load was served well enough."""
    least: Tried | None
    """The least load that was put on it, where none was served well enough: less may be."""
    against_split: float | None
    """Its goodput over the split's; None for the split itself, or where either has none."""

    @property
    def goodput(self) -> str:
        """Good requests a second, or from which load on there are too few."""
        if self.best is not None:
            return f"{self.best.good_per_s:.2f}"
        return "–" if self.least is None else f"< {self.least.rate_per_s:g} ({self.least.share:.0%})"

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
            if name != SPLIT and split is not None and best is not None:
                ratio = best.good_per_s / split.good_per_s
            mine = [run for run in runs if run.arrangement == name]
            least = _least(mine, ttft_ms, limit) if best is None else None
            rows.append(Row(limit, name, any(run.peer for run in mine), best, least, ratio))
    return rows


def _least(runs: Sequence[LoadRun], ttft_ms: float, itl_ms: float) -> Tried | None:
    """The least load, by the chunk that served it best."""
    if not runs:
        return None
    rate = min(run.rate_per_s for run in runs)
    return Tried(rate, max(run.share(ttft_ms, itl_ms) for run in runs if run.rate_per_s == rate))


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
        if split is None or both is None:
            parts.append(f"at {limit:g} ms {_unserved(arrangements[SPLIT], arrangements[COLOCATED])}")
        else:
            ratio = split.good_per_s / both.good_per_s
            loses = "**the split loses**, serving" if ratio < 1 else "the split serves"
            parts.append(f"at {limit:g} ms {loses} {ratio:.2f} times what colocated engines do")
    return f"{mix}: {'; '.join(parts)}." if parts else f"{mix}: not compared yet."


def _unserved(split: Row, both: Row) -> str:
    """In words, where one of the two serves no load that was tried: whether that decides."""
    if split.best is None and both.best is None:
        return "neither serves a load that was tried"
    loser, winner = (split, both) if split.best is None else (both, split)
    if winner.best is None or loser.least is None:
        return "one of the two was not tried"
    good = winner.best.good_per_s
    if loser.least.rate_per_s <= good:
        loses = "**the split loses**, serving" if loser is split else "colocated engines lose, serving"
        return f"{loses} less than {loser.least.rate_per_s / good:.2f} times what the other does"
    name, other = (
        ("the split", "colocated engines serve")
        if loser is split
        else ("colocated engines", "the split serves")
    )
    return f"{name} may serve less than was tried ({loser.least}); {other} {good:.2f}/s"
