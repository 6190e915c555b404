"""What one request showed on the wire, and the figures that follow from it.

All times are seconds of one monotonic clock in one process. ``intended_s`` is when the workload says that the
request is sent: latency counts from there, so a request that could not be sent in time is slow, not absent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from antiphon.benchmarks.serve.statistics import percentile


@dataclass(slots=True)
class Observation:
    """One request, filled in while it runs."""

    session: int
    turn: int
    intended_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    """Arrival of the first event that carries output."""
    last_s: float | None = None
    """Arrival of the last event that carries output."""
    ended_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between events that carry output; a server that joins tokens has fewer and longer ones."""
    input_asked: int = 0
    output_asked: int = 0
    input_tokens: int = 0
    """By the server's usage; what was asked for where it reports none."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """By the server's usage; the number of events where it reports none."""
    usage_reported: bool = False
    stages_s: dict[str, float] = field(default_factory=dict)
    """From the Server-Timing header, where there is one."""
    error: str | None = None

    def saw_output(self, now_s: float) -> None:
        """An event with output was read at ``now_s``."""
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s

    @property
    def ok(self) -> bool:
        """Answered to the end, with at least one token."""
        return self.error is None and self.first_s is not None

    @property
    def ttft_s(self) -> float:
        """Intended sending to first output."""
        return _known(self.first_s) - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Intended sending to last output."""
        return _known(self.last_s) - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None when everything came in one event."""
        if self.output_tokens < 2 or not self.gaps_s:
            return None
        return (_known(self.last_s) - _known(self.first_s)) / (self.output_tokens - 1)

    @property
    def itl_p99_s(self) -> float | None:
        """99th percentile of this request's own gaps; None without a gap."""
        return percentile(sorted(self.gaps_s), 0.99) if self.gaps_s else None

    @property
    def late_s(self) -> float:
        """How long after the intended time the request left; the generator's own delay in an open loop."""
        return self.sent_s - self.intended_s


def _known(time_s: float | None) -> float:
    if time_s is None:
        raise ValueError("the request has no output")
    return time_s


def parse_server_timing(header: str) -> dict[str, float]:
    """Durations in seconds by name, of ``queue;dur=1.5, prefill;dur=20;desc="..."`` (milliseconds)."""
    stages: dict[str, float] = {}
    for metric in header.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur" and name:
                try:
                    stages[name] = float(value.strip().strip('"')) / 1e3
                except ValueError:
                    continue  # a malformed metric of a foreign server is no figure of ours
    return stages
