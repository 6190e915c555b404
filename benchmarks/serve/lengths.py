"""How long prompts and answers are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from antiphon.benchmarks.serve.arrivals import WorkloadError, parse_settings, refuse_rest


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        return self.tokens

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return float(self.tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from ``low`` to ``high``, both included, alike."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        return rng.randint(self.low, self.high)

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with ``mean`` tokens and ``sigma`` of the logarithm, cut into [low, high]."""

    mean: float
    sigma: float
    low: int = 1
    high: int = 131_072

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Lengths seen before, drawn with replacement."""

    values: tuple[int, ...]

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        return rng.choice(self.values)

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return sum(self.values) / len(self.values)


Lengths = Fixed | Uniform | LogNormal | Sampled


def parse_lengths(text: str, option: str) -> Lengths:
    """``512``, ``uniform:low=100,high=900``, ``lognormal:mean=1000,sigma=0.8,high=8000`` or ``file:PATH``.

    A file holds one length per line. ``option`` names the option in errors.

    Raises:
        WorkloadError: another text, a length below 1, an unknown setting, a file that cannot be read.
    """
    if text.startswith("file:"):
        return Sampled(_read_lengths(Path(text.removeprefix("file:")), option))
    plain = text.removeprefix("fixed:")
    if plain.isdecimal():
        if int(plain) < 1:
            raise WorkloadError(f"{option} {text!r}: at least 1 token")
        return Fixed(int(plain))
    name, settings = parse_settings(text, option)
    try:
        match name:
            case "uniform":
                low, high = int(settings.pop("low")), int(settings.pop("high"))
                refuse_rest(settings, text, option)
                if not 1 <= low <= high:
                    raise WorkloadError(f"{option} {text!r}: 1 <= low <= high")
                return Uniform(low, high)
            case "lognormal":
                mean, sigma = settings.pop("mean"), settings.pop("sigma")
                low, high = int(settings.pop("low", 1)), int(settings.pop("high", 131_072))
                refuse_rest(settings, text, option)
                if mean < 1 or sigma < 0 or not 1 <= low <= high:
                    raise WorkloadError(
                        f"{option} {text!r}: mean at least 1, sigma at least 0, 1 <= low <= high"
                    )
                return LogNormal(mean, sigma, low, high)
    except KeyError as error:
        raise WorkloadError(f"{option} {text!r}: {error} is missing") from error
    raise WorkloadError(f"{option} {text!r}: expected a number, uniform:.., lognormal:.. or file:PATH")


def _read_lengths(path: Path, option: str) -> tuple[int, ...]:
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{option} file:{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.isdecimal() or int(line) < 1:
            raise WorkloadError(
                f"{option} file:{path}: entry {number}, {line[:40]!r}, is not a number of tokens"
            )
    if not lines:
        raise WorkloadError(f"{option} file:{path}: no lengths")
    return tuple(int(line) for line in lines)
