"""The report's figures from observations that are made by hand, to the last digit."""

from __future__ import annotations

import pytest

from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.report import report
from antiphon.benchmarks.serve.runner import Run
from antiphon.benchmarks.serve.slo import Slo


def observation(intended_s: float, ttft_s: float, gaps_s: list[float], *, late_s: float = 0.0) -> Observation:
    seen = Observation(
        0, 0, intended_s, sent_s=intended_s + late_s, input_asked=100, output_asked=1 + len(gaps_s)
    )
    seen.input_tokens, seen.output_tokens, seen.cached_tokens = 100, 1 + len(gaps_s), 40
    now = intended_s + ttft_s
    seen.saw_output(now)
    for gap in gaps_s:
        now += gap
        seen.saw_output(now)
    return seen


def run_by_hand() -> Run:
    """Ten seconds from 1000 on, the first two of them warm-up; four measured requests, one of them failed."""
    failed = observation(1008.0, 0.1, [])
    failed.error = "HTTP 503: no room"
    observations = [
        observation(1001.0, 0.5, [0.25] * 6),  # warm-up; its tokens at 1002.0 and later are in the window
        observation(1003.0, 0.1, [0.01] * 4),
        observation(1004.0, 0.2, [0.02] * 4, late_s=0.15),
        observation(1005.0, 0.3, [0.03] * 4),
        failed,
    ]
    return Run(observations, 1000.0, 1002.0, 1010.0, loop_lag_s=[0.0, 0.001], cpu_share=0.9)


def test_every_figure_by_hand() -> None:
    slos = [Slo(ttft_s=0.25), Slo(ttft_s=0.25, tpot_s=0.015), Slo(e2e_s=1.0)]
    document = report(run_by_hand(), {"url": "u"}, slos, {"queue": 0.01})
    assert document["window_s"] == 8.0
    requests, rates, latency = document["requests"], document["rates"], document["latency_s"]
    assert (requests["sent"], requests["warmup"], requests["measured"]) == (5, 1, 4)
    assert (requests["answered"], requests["failed"]) == (3, 1)
    assert requests["errors"] == {"HTTP 503: no room": 1}
    assert latency["ttft"]["p50"] == pytest.approx(0.2)
    assert latency["ttft"]["p90"] == pytest.approx(0.28)
    assert latency["ttft"]["max"] == pytest.approx(0.3)
    assert latency["itl"]["count"] == 12
    assert latency["itl"]["mean"] == pytest.approx(0.02)
    assert latency["tpot"]["p50"] == pytest.approx(0.02)
    assert latency["e2e"]["p50"] == pytest.approx(0.28)
    # Three answers of five tokens, the failed one's token, and five of seven of the warm-up request.
    assert rates["output_tokens_per_s"] == pytest.approx((15 + 1 + 5) / 8)
    assert rates["input_tokens_per_s"] == pytest.approx(300 / 8)
    assert rates["offered_requests_per_s"] == 0.5
    assert rates["answered_requests_per_s"] == 0.375
    assert rates["cached_input_share"] == 0.4
    assert [each["good"] for each in document["goodput"]] == [2, 1, 3]
    assert [each["share"] for each in document["goodput"]] == [0.5, 0.25, 0.75]
    assert document["goodput"][0]["requests_per_s"] == 0.25
    assert document["stages_s"]["server_metrics_mean"] == {"queue": 0.01}


def test_the_generator_complains_of_itself() -> None:
    complaints = report(run_by_hand(), {}, [], {})["generator_health"]["complaints"]
    assert len(complaints) == 2
    assert "after their time" in complaints[0]
    assert "90%" in complaints[1]
