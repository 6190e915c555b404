"""Mean time of each stage, from the server's own Prometheus histograms before and after a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

STAGE_HISTOGRAM = "antiphon_stage_duration_seconds"
_SAMPLE = re.compile(rf"^{STAGE_HISTOGRAM}_(sum|count)\{{([^}}]*)\}} (\S+)", re.MULTILINE)
_STAGE = re.compile(r'stage="([^"]*)"')


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Seconds and observations by stage since the server started."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    count: Mapping[str, float] = field(default_factory=dict)

    def mean_since(self, earlier: StageTotals) -> dict[str, float]:
        """Mean seconds of each stage that was observed in between."""
        means = {}
        for stage, count in self.count.items():
            observed = count - earlier.count.get(stage, 0.0)
            if observed > 0:
                means[stage] = (self.seconds.get(stage, 0.0) - earlier.seconds.get(stage, 0.0)) / observed
        return means


def parse_stages(text: str) -> StageTotals:
    """Totals of the exposition format; empty when the server has no such histogram."""
    totals: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for kind, labels, value in _SAMPLE.findall(text):
        if stage := _STAGE.search(labels):
            totals[kind][stage[1]] = totals[kind].get(stage[1], 0.0) + float(value)
    return StageTotals(totals["sum"], totals["count"])


async def read_stages(base_url: str) -> StageTotals:
    """The server's totals now; empty for a server without such metrics, since stages are an extra."""
    async with httpx.AsyncClient(base_url=base_url, timeout=10.0, trust_env=False) as http:
        try:
            response = await http.get("/metrics")
        except httpx.HTTPError:
            return StageTotals()
    return parse_stages(response.text) if response.is_success else StageTotals()
