"""Which loads each arrangement is given: durations by mix, first rates that are fixed or expected, limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.split.arrangements import COLOCATED, Arrangement
from antiphon.benchmarks.split.expected import capacity_per_s, in_service
from antiphon.benchmarks.split.ladder import Ladder
from antiphon.benchmarks.split.mixes import Mix
from antiphon.protocol.errors import ConfigError

FIRST_SHARE = 0.9
"""Of the expected capacity, where a ladder begins."""
WORTH_SHARE = 0.5
"""A chunk that is expected to serve less than this part of what the best one does is not measured there."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A load's duration and the part of it that is left out."""

    duration_s: float
    warmup_s: float


def load_seconds(durations_s: Mapping[str, float], warmups_s: Mapping[str, float]) -> dict[str, Seconds]:
    """Of mixes that have both by name.

    Raises:
        ConfigError: a mix has one alone.
    """
    if alone := sorted(durations_s.keys() ^ warmups_s.keys()):
        raise ConfigError(f"{', '.join(alone)}: a duration and a warm-up of its own go together")
    return {mix: Seconds(durations_s[mix], warmups_s[mix]) for mix in durations_s}


@dataclass(frozen=True, slots=True)
class FixedLoads:
    """The same ladder for every arrangement and mix, searched for the loosest limit.

    Attributes:
        base: whose limit is the loosest.
    """

    base: Ladder
    seconds: Mapping[str, Seconds]
    """By mix; others are those of ``base``."""

    def ladders(self, arrangement: Arrangement, mix: Mix) -> Sequence[Ladder]:
        """See ``HttpLoad.ladders_of``."""
        return [_timed(self.base, self.seconds.get(mix.name))]

    def standing(self, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> int:
        """See ``HttpLoad.standing_of``."""
        return 0


@dataclass(frozen=True, slots=True)
class ExpectedLoads:
    """Ladders that begin near what the cost model expects, one for each limit, and steady loads.

    Of colocated engines with several chunks each is measured under the limits at which it may be the best,
    and not at all with prompts that a smaller chunk holds whole: it would compute them in the same way.
    """

    base: Ladder
    seconds: Mapping[str, Seconds]
    limits_ms: tuple[float, ...]
    model: CostModel
    arrangements: Sequence[Arrangement]

    def ladders(self, arrangement: Arrangement, mix: Mix) -> Sequence[Ladder]:
        """See ``HttpLoad.ladders_of``; the loosest limit first, left out only with all others."""
        if self._same_as_another(arrangement, mix):
            return []
        timed = _timed(self.base, self.seconds.get(mix.name))
        found: list[Ladder] = []
        for limit in sorted(self.limits_ms, reverse=True):
            rate = FIRST_SHARE * capacity_per_s(self.model, arrangement, mix, limit * 1e-3)
            hopeless = not rate or (
                arrangement.name == COLOCATED and rate < WORTH_SHARE * self._best(mix, limit)
            )
            if found and hopeless:
                continue
            first = min(max(rate, timed.least_per_s), timed.highest_per_s)
            found.append(replace(timed, itl_ms=limit, first_per_s=first))
        return found

    def standing(self, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> int:
        """See ``HttpLoad.standing_of``."""
        return in_service(self.model, arrangement, mix, rate_per_s)

    def _same_as_another(self, arrangement: Arrangement, mix: Mix) -> bool:
        mine = arrangement.chunk_tokens
        return mine is not None and any(
            each.chunk_tokens is not None
            and each.name == arrangement.name
            and mix.input_tokens <= each.chunk_tokens < mine
            for each in self.arrangements
        )

    def _best(self, mix: Mix, limit_ms: float) -> float:
        rates = [
            capacity_per_s(self.model, each, mix, limit_ms * 1e-3)
            for each in self.arrangements
            if each.name == COLOCATED
        ]
        return FIRST_SHARE * max(rates)


def _timed(base: Ladder, seconds: Seconds | None) -> Ladder:
    if seconds is None:
        return base
    return replace(base, duration_s=seconds.duration_s, warmup_s=seconds.warmup_s)
