"""The report of a run as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from antiphon.benchmarks.serve.report import Document, latencies
from antiphon.benchmarks.serve.runner import Run
from antiphon.benchmarks.serve.statistics import percentile
from antiphon.benchmarks.svg import Axis, Chart, Series, bars

CURVE_POINTS = 200
TIMELINE_POINTS = 1500

STYLE = """
body{font-family:sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(28rem,1fr));gap:1rem}
.complaint{background:#fdecc8;padding:.6rem;border-radius:.3rem}
"""


def render_html(run: Run, doc: Document) -> str:
    """A page of tables and plots."""
    complaints = "".join(
        f'<p class="complaint">{escape(c)}</p>' for c in doc["generator_health"]["complaints"]
    )
    sections = [
        f"<h1>Load on {escape(str(doc['asked'].get('url')))}</h1>",
        f"<p>{escape(str(doc['asked'].get('model')))} · {escape(str(doc['date']))} · "
        f"{doc['window_s']:.1f} s measured</p>",
        complaints,
        "<h2>Latency</h2>",
        _latency_table(doc["latency_s"]),
        "<h2>Requests and rates</h2>",
        _pairs({**doc["requests"], **doc["rates"], **_goodput(doc["goodput"])}),
        '<div class="plots">',
        *_plots(run, doc),
        "</div>",
        "<h2>Asked</h2>",
        _pairs(doc["asked"]),
        "<h2>Generator</h2>",
        _pairs({**doc["generator"], **_flat(doc["generator_health"])}),
        f"<p>Commit {escape(str(doc['commit']))}. Latencies count from a request's intended time; ITL is "
        "the time between events that carry output, of all requests.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Load report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _plots(run: Run, doc: Document) -> list[str]:
    answered = [each for each in run.measured() if each.ok]
    tpots = [each.tpot_s for each in answered]
    charts = [
        _cdf("Time to first token", [each.ttft_s for each in answered]),
        _cdf("Inter-token latency", [gap for each in answered for gap in each.gaps_s]),
        _cdf("Time per output token", [tpot for tpot in tpots if tpot is not None]),
        _cdf("End to end", [each.e2e_s for each in answered]),
        _timeline(run),
    ]
    if stages := doc["stages_s"]["server_metrics_mean"]:
        rows = [(name, seconds * 1e3) for name, seconds in stages.items()]
        charts.append(bars("Stages, mean by the server's metrics", "ms", rows))
    return charts


def _cdf(title: str, values: Sequence[float]) -> str:
    ordered = sorted(value * 1e3 for value in values)
    shares = [i / CURVE_POINTS for i in range(CURVE_POINTS + 1)] if ordered else []
    curve = [(percentile(ordered, share), share * 100) for share in shares]
    log = bool(ordered) and ordered[0] > 0 and ordered[-1] / ordered[0] > 20
    series = Series("share of values", curve, marks=False)
    return Chart(title, Axis("ms", log=log), Axis("% at or below"), (series,)).render()


def _timeline(run: Run) -> str:
    answered = [each for each in run.observations if each.ok]
    every = max(1, len(answered) // TIMELINE_POINTS)
    points = [(each.intended_s - run.began_s, each.ttft_s * 1e3) for each in answered[::every]]
    series = Series("requests", points, line=False)
    return Chart("TTFT over the run", Axis("intended time, s"), Axis("ms"), (series,)).render()


def _latency_table(latency: Mapping[str, Mapping[str, float | None]]) -> str:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{c}</th>" for c in columns)
    rows = []
    for name in latencies([]):
        cells = "".join(f"<td>{_ms(latency[name][c])}</td>" for c in columns)
        rows.append(f"<tr><td>{name.upper()}, ms</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:,.2f}"


def _pairs(values: Mapping[str, object]) -> str:
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{_value(v)}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(k))}: {_value(v)}" for k, v in value.items()) or "none"
    return escape(str(value))


def _goodput(found: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    return {
        f"goodput, {each['objectives']}": f"{each['requests_per_s']:.2f} requests/s, {each['share']:.1%}"
        for each in found
    }


def _flat(found: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in found.items() if key != "complaints"}
