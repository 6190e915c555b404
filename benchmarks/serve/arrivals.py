"""When requests arrive: open-loop processes as iterators of seconds since the start.

An open loop sends at these times whatever the server does, so that a slow server does not slow its own load.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.protocol.errors import AntiphonError


class WorkloadError(AntiphonError):
    """A description of load cannot be used; the message names the option and the value."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/rate seconds."""

    rate_per_s: float

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times in seconds, without end."""
        for index in itertools.count(1):
            yield index / self.rate_per_s


@dataclass(frozen=True, slots=True)
class GammaGaps:
    """A renewal process with gamma distributed gaps; ``cv`` 1 is a Poisson process, above 1 is bursty."""

    rate_per_s: float
    cv: float = 1.0
    """Standard deviation of a gap over its mean."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times in seconds, without end."""
        shape = 1 / self.cv**2
        scale = 1 / (self.rate_per_s * shape)
        now = 0.0
        while True:
            now += rng.expovariate(self.rate_per_s) if self.cv == 1 else rng.gammavariate(shape, scale)
            yield now


@dataclass(frozen=True, slots=True)
class Modulated:
    """Two Poisson processes taken in turns (MMPP-2): a quiet one and bursts, mean rate ``rate_per_s``."""

    rate_per_s: float
    burst_factor: float = 4.0
    """Rate within a burst over the mean rate."""
    burst_share: float = 0.1
    """Part of the time that is burst; ``burst_factor * burst_share`` is at most 1."""
    burst_mean_s: float = 5.0
    """Mean length of a burst; both states last exponentially long."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times in seconds, without end."""
        fast = self.rate_per_s * self.burst_factor
        slow = self.rate_per_s * (1 - self.burst_factor * self.burst_share) / (1 - self.burst_share)
        quiet_mean_s = self.burst_mean_s * (1 - self.burst_share) / self.burst_share
        now, bursting = 0.0, rng.random() < self.burst_share
        while True:
            ends = now + rng.expovariate(1 / (self.burst_mean_s if bursting else quiet_mean_s))
            rate = fast if bursting else slow
            while rate > 0 and (now := now + rng.expovariate(rate)) < ends:
                yield now
            # Memoryless: the gap that crossed the end is drawn anew at the next state's rate.
            now, bursting = ends, not bursting


Arrivals = Constant | GammaGaps | Modulated


def parse_arrivals(text: str, rate_per_s: float) -> Arrivals:
    """``constant``, ``poisson``, ``gamma:cv=3`` or ``mmpp:factor=4,share=0.1,burst=5``.

    Raises:
        WorkloadError: another text, an unknown setting, or one out of its range.
    """
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise WorkloadError(f"rate {rate_per_s}: must be a positive number of requests per second")
    name, settings = parse_settings(text, "arrivals")
    match name:
        case "constant":
            refuse_rest(settings, text, "arrivals")
            return Constant(rate_per_s)
        case "poisson":
            refuse_rest(settings, text, "arrivals")
            return GammaGaps(rate_per_s)
        case "gamma":
            cv = settings.pop("cv", 2.0)
            refuse_rest(settings, text, "arrivals")
            if cv <= 0:
                raise WorkloadError(f"arrivals {text!r}: cv must be positive")
            return GammaGaps(rate_per_s, cv)
        case "mmpp":
            factor, share = settings.pop("factor", 4.0), settings.pop("share", 0.1)
            burst_s = settings.pop("burst", 5.0)
            refuse_rest(settings, text, "arrivals")
            if not (factor >= 1 and 0 < share < 1 and factor * share <= 1 and burst_s > 0):
                raise WorkloadError(
                    f"arrivals {text!r}: factor at least 1, share between 0 and 1, factor * share at most 1, "
                    "burst positive"
                )
            return Modulated(rate_per_s, factor, share, burst_s)
    raise WorkloadError(f"arrivals {text!r}: expected constant, poisson, gamma:cv=.. or mmpp:factor=..")


def parse_settings(text: str, option: str) -> tuple[str, dict[str, float]]:
    """``name:key=1,other=2`` as (name, settings).

    Raises:
        WorkloadError: the text has another form.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            settings[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(settings.get(key.strip(), math.nan)):
            raise WorkloadError(f"{option} {text!r}: {part!r} is not KEY=NUMBER")
    return name.strip(), settings


def refuse_rest(settings: dict[str, float], text: str, option: str) -> None:
    """Raise for settings that nothing has taken.

    Raises:
        WorkloadError: there are some.
    """
    if settings:
        raise WorkloadError(f"{option} {text!r}: unknown {', '.join(sorted(settings))}")
