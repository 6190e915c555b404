"""Service level objectives and goodput."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.benchmarks.serve.arrivals import WorkloadError
from antiphon.benchmarks.serve.observation import Observation

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_duration_s(text: str, option: str) -> float:
    """``500ms``, ``1.5s``, ``250us``, ``2min`` in seconds.

    Raises:
        WorkloadError: no unit, another unit, or not positive; names ``option``.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in _UNITS_S or float(match[1]) <= 0:
        raise WorkloadError(f"{option} {text!r}: expected a positive time with its unit, such as 500ms or 1s")
    return float(match[1]) * _UNITS_S[match[2]]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time of an output token after the first."""
    itl_s: float | None = None
    """99th percentile of the request's own gaps between tokens."""
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=1s,itl=20ms`` with any of ttft, tpot, itl, e2e.

        Raises:
            WorkloadError: another key or a bad time.
        """
        limits: dict[str, float] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            key, _, value = part.partition("=")
            if key not in ("ttft", "tpot", "itl", "e2e"):
                raise WorkloadError(f"slo {part!r}: expected ttft=, tpot=, itl= or e2e= with a time")
            limits[f"{key}_s"] = parse_duration_s(value, f"slo {key}")
        if not limits:
            raise WorkloadError("slo: names no limit")
        return cls(**limits)

    @property
    def name(self) -> str:
        """Such as ``ttft 1000 ms, itl 20 ms``."""
        limits = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("itl", self.itl_s), ("e2e", self.e2e_s))
        return ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in limits if limit is not None)

    def met_by(self, seen: Observation) -> bool:
        """Whether a request was answered within every limit; a failed one never is."""
        if not seen.ok:
            return False
        pairs = (
            (self.ttft_s, seen.ttft_s),
            (self.tpot_s, seen.tpot_s),
            (self.itl_s, seen.itl_p99_s),
            (self.e2e_s, seen.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met the objectives."""

    good: int
    share: float
    """Of all measured requests, failed ones included."""
    requests_per_s: float


def goodput(slo: Slo, measured: Sequence[Observation], window_s: float) -> Goodput:
    """Good requests of a window; the share is 0 of nothing."""
    good = sum(slo.met_by(each) for each in measured)
    return Goodput(good, good / len(measured) if measured else 0.0, good / window_s if window_s > 0 else 0.0)
