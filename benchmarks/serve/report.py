"""A run as one document: what was asked, what was observed, and whether the generator itself kept up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from antiphon.benchmarks import records
from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.runner import Run
from antiphon.benchmarks.serve.slo import Slo, goodput
from antiphon.benchmarks.serve.statistics import Summary, summarise

LATE_LIMIT_S = 0.01
"""Beyond this 99th percentile of lateness the generator is said not to have kept its schedule."""
CPU_LIMIT = 0.8

Document = dict[str, Any]
"""JSON with the nesting of ``report``."""


def report(
    run: Run, asked: Mapping[str, object], slos: Sequence[Slo], stages: Mapping[str, float]
) -> Document:
    """The JSON document of a run; times in seconds. ``stages``: mean seconds by the server's metrics."""
    measured = run.measured()
    answered = [each for each in measured if each.ok]
    window_s = run.measured_to_s - run.measured_from_s
    return {
        "bench": "serve",
        "commit": records.checkout_commit(),
        "date": records.now(),
        "generator": records.this_machine(),
        "asked": dict(asked),
        "window_s": window_s,
        "requests": _requests(run, measured, answered),
        "latency_s": {name: asdict(summary) for name, summary in latencies(answered).items()},
        "rates": _rates(run, measured, answered, window_s),
        "goodput": [_goodput(slo, measured, window_s) for slo in slos],
        "stages_s": {"server_metrics_mean": dict(stages), "server_timing": _stages(answered)},
        "generator_health": health(run, measured),
        "per_request": [_line(each, run.began_s) for each in run.observations],
    }


def latencies(answered: Sequence[Observation]) -> dict[str, Summary]:
    """TTFT and E2E from the intended time, TPOT per request, ITL over all gaps of all requests."""
    tpots = [each.tpot_s for each in answered]
    return {
        "ttft": summarise([each.ttft_s for each in answered]),
        "itl": summarise([gap for each in answered for gap in each.gaps_s]),
        "tpot": summarise([tpot for tpot in tpots if tpot is not None]),
        "e2e": summarise([each.e2e_s for each in answered]),
    }


def health(run: Run, measured: Sequence[Observation]) -> Document:
    """Whether the figures are the server's, or the generator's own delays."""
    late = summarise([each.late_s for each in measured if each.sent_s])
    lag = summarise(run.loop_lag_s)
    complaints = []
    if late.p99 is not None and late.p99 > LATE_LIMIT_S:
        complaints.append(
            f"1 % of requests left {late.p99 * 1e3:.0f} ms or more after their time; raise max-in-flight or "
            "lower the rate (the latencies count from the intended time all the same)"
        )
    if run.cpu_share > CPU_LIMIT:
        complaints.append(f"the generator used {run.cpu_share:.0%} of one core: it may be what is measured")
    return {
        "late_s": asdict(late),
        "loop_lag_s": asdict(lag),
        "cpu_share": run.cpu_share,
        "peak_in_flight": run.peak_in_flight,
        "complaints": complaints,
    }


def _goodput(slo: Slo, measured: Sequence[Observation], window_s: float) -> Document:
    return {"objectives": slo.name, "slo": asdict(slo), **asdict(goodput(slo, measured, window_s))}


def _requests(run: Run, measured: Sequence[Observation], answered: Sequence[Observation]) -> Document:
    errors = Counter(each.error for each in measured if each.error is not None)
    missed = sum(each.output_tokens != each.output_asked for each in answered)
    inexact = sum(each.input_tokens != each.input_asked for each in answered if each.turn == 0)
    return {
        "sent": len(run.observations),
        "warmup": len(run.observations) - len(measured),
        "measured": len(measured),
        "answered": len(answered),
        "failed": len(measured) - len(answered),
        "errors": dict(errors.most_common()),
        "input_length_differs": inexact,
        "output_length_differs": missed,
        "usage_reported": sum(each.usage_reported for each in answered),
    }


def _rates(
    run: Run, measured: Sequence[Observation], answered: Sequence[Observation], window_s: float
) -> Document:
    """Per second of the window; output by arrival of its events, of warm-up requests too."""
    in_window = sum(
        _tokens_between(each, run.measured_from_s, run.measured_to_s) for each in run.observations
    )
    inputs = sum(each.input_tokens for each in answered)
    span = window_s if window_s > 0 else float("inf")
    return {
        "offered_requests_per_s": len(measured) / span,
        "answered_requests_per_s": len(answered) / span,
        "output_tokens_per_s": in_window / span,
        "input_tokens_per_s": inputs / span,
        "cached_input_share": sum(each.cached_tokens for each in answered) / inputs if inputs else 0.0,
    }


def _tokens_between(seen: Observation, from_s: float, to_s: float) -> float:
    """Output tokens that arrived in [from, to]; each event of a request carries the same share of them."""
    if seen.first_s is None:
        return 0.0
    now, inside = seen.first_s, 0
    for gap in (0.0, *seen.gaps_s):
        now += gap
        inside += from_s <= now <= to_s
    events = 1 + len(seen.gaps_s)
    return (seen.output_tokens or events) * inside / events


def _stages(answered: Sequence[Observation]) -> Document:
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for each in answered:
        for name, seconds in each.stages_s.items():
            by_name[name].append(seconds)
    return {name: asdict(summarise(values)) for name, values in by_name.items()}


def _line(seen: Observation, began_s: float) -> Document:
    """One request, compact; times in seconds since the start of the run."""
    round6: Callable[[float], float] = lambda value: round(value, 6)  # noqa: E731
    line: Document = {
        "session": seen.session,
        "turn": seen.turn,
        "intended_s": round6(seen.intended_s - began_s),
        "late_s": round6(seen.late_s) if seen.sent_s else None,
        "input_tokens": seen.input_tokens,
        "output_tokens": seen.output_tokens,
        "error": seen.error,
    }
    if seen.ok:
        itl = seen.itl_p99_s
        line |= {
            "ttft_s": round6(seen.ttft_s),
            "e2e_s": round6(seen.e2e_s),
            "itl_p99_s": None if itl is None else round6(itl),
        }
    return line
