"""Which loads an arrangement is given under a limit: up until one is too much, then between the last two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.benchmarks.split.observed import LoadRun
from antiphon.protocol.errors import AntiphonError

FARTHEST_DOWN = 16
"""Steps below the first load that are tried when that is too much; each stride is twice the one before."""
FEWEST_REQUESTS = 5
"""Expected requests of a load's window below which it says nothing."""
ROUNDING = 1.01
"""Rates are rounded, and so are their ratios."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Which loads an arrangement is given, and when it counts as broken: under one limit of ITL."""

    first_per_s: float
    step: float
    """Each load is so many times the one before."""
    highest_per_s: float
    duration_s: float
    warmup_s: float
    ttft_ms: float
    itl_ms: float
    attainment: float
    """Share of requests that must keep the limits; below it no higher load is tried."""
    refine: int = 1
    """Loads tried between the last that held and the first that did not."""

    def __post_init__(self) -> None:
        if self.first_per_s <= 0 or self.step <= 1 or self.highest_per_s < self.first_per_s:
            raise AntiphonError("rates rise from a positive one by a factor above 1 to a highest one")
        if not 0 <= self.warmup_s < self.duration_s or not 0 < self.attainment <= 1 or self.refine < 0:
            raise AntiphonError("the warm-up ends within the duration, the attainment lies in (0, 1]")
        if not self.says_something(self.first_per_s):
            raise AntiphonError(
                f"{self.first_per_s:g} requests/s for {self.duration_s - self.warmup_s:g} s: at least "
                f"{FEWEST_REQUESTS} requests are needed"
            )

    @property
    def least_per_s(self) -> float:
        """The lowest load that says something."""
        return FEWEST_REQUESTS / (self.duration_s - self.warmup_s)

    def says_something(self, rate_per_s: float) -> bool:
        """Whether enough requests of such a load fall into its window."""
        return rate_per_s * ROUNDING >= self.least_per_s

    def holds(self, run: LoadRun) -> bool:
        """Whether the arrangement kept up with this load."""
        return run.share(self.ttft_ms, self.itl_ms) >= self.attainment


class RateSearch:
    """The next load for one arrangement and mix, whatever loads are known of it from earlier runs."""

    def __init__(self, ladder: Ladder, known: Sequence[LoadRun]) -> None:
        self._ladder = ladder
        self.known = list(known)

    def add(self, run: LoadRun) -> None:
        """A load was measured."""
        self.known.append(run)

    def next_rate(self) -> float | None:
        """Requests per second to try; None when the search is over."""
        ladder = self._ladder
        broke = min((run.rate_per_s for run in self.known if not ladder.holds(run)), default=None)
        held = max(
            (
                run.rate_per_s
                for run in self.known
                if ladder.holds(run) and (broke is None or run.rate_per_s < broke)
            ),
            default=None,
        )
        if broke is None:
            return self._above(held)
        if held is None:
            return self._below(broke)
        near_enough = ladder.step ** (0.5**ladder.refine) * ROUNDING
        return None if broke / held <= near_enough else rounded((held * broke) ** 0.5)

    def _above(self, held: float | None) -> float | None:
        ladder = self._ladder
        if held is None or held * ROUNDING < ladder.first_per_s:
            return rounded(ladder.first_per_s)
        higher = rounded(held * ladder.step)
        return higher if higher <= ladder.highest_per_s else None

    def _below(self, broke: float) -> float | None:
        ladder = self._ladder
        if ladder.first_per_s * ROUNDING < broke:
            return rounded(ladder.first_per_s)
        tried = sum(run.rate_per_s <= ladder.first_per_s * ROUNDING for run in self.known)
        lower = rounded(broke / ladder.step ** (2 ** max(0, tried - 1)))
        floor = ladder.first_per_s / ladder.step**FARTHEST_DOWN / ROUNDING
        return lower if lower >= floor and ladder.says_something(lower) else None


def rounded(rate_per_s: float) -> float:
    """Three significant digits, so that a resumed run meets the same loads."""
    return float(f"{rate_per_s:.3g}")
