"""``docs/benchmarks.md`` and its plots, made from the raw figures alone.

python -m antiphon.benchmarks.report.page
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.peers.pairs import load_pairs
from antiphon.benchmarks.plan.cost_model import CostModel, build
from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.plan.planner import LAYOUTS
from antiphon.benchmarks.records import BENCH_DECODE, RESULTS, Record, RecordError, load_results
from antiphon.benchmarks.report import beside, hand_off, markdown, split
from antiphon.benchmarks.svg import Axis, Chart, Series
from antiphon.benchmarks.sweep.points import CONTEXTS, MODELS, grid
from antiphon.benchmarks.sweep.prices import Figure, by_layout, figure, pareto_front

DOCS = Path(__file__).resolve().parents[2] / "docs"
PRICE = 3.0

HEAD = """# Benchmarks

This page is made from `benchmarks/results/*.json` by `antiphon bench report`; nothing in it is typed.

A figure in *italics with a p* is **predicted** by the cost model of `antiphon plan`: floors (bytes over
rated bandwidth, operations over rated speed) times an efficiency for each kernel class. A plain figure is
**measured** on {gpu}, with its commit and date in the raw file. One with an r is measured on a worker that
was told to hold FP8 experts beside the 4-bit ones (`fp8_experts: resident`), and stands where a worker's
defaults have not been measured. Prices are at ${price:.2f} per GPU hour. DP, as whole replicas of a layout,
multiplies the rate at the same latency and price, so it has no rows in these tables; what replicas cost one
another is measured below where it was.
"""

COST_MODEL = """## What predictions rest on

The time of a kernel class is a sum of three terms: its launches, its bytes at the rated bandwidth times a
factor, and its operations at the rated speed times a factor. "Assumed" classes were not measured yet; sums
over more than two ranks are taken as those of two, by what each sends. Whole measured steps then give a
factor to each of these: attention, experts, FP8 experts that are held, other products, small kernels with
planning, launches that wait for those before them, kernels that begin before those are over, and what ranks
do together. Errors are those of each measured point when it is predicted from all the others; of every layout
of several ranks when none of their points is known; and of one model when none of its own is. Replicas of TP1
are not among them.
"""


def render(results: Path = RESULTS, gpu_hour_price: float = PRICE) -> dict[str, str]:
    """Text of every file of the page, by its name under ``docs``.

    Raises:
        RecordError: a file of results cannot be read.
    """
    measured = load_results(results)
    files: dict[str, str] = {}
    sections = [HEAD.format(gpu=H200.name, price=gpu_hour_price)]
    models = [build(name, measured) for name in MODELS]
    for model in models:
        sections.append(_model_section(model, measured, gpu_hour_price, files))
    sections += [COST_MODEL, markdown.efficiency_table(models[0].efficiencies), ""]
    sections += ["Whole steps, all models and layouts together:\n", markdown.step_error_table(models[0]), ""]
    sections += [beside.peer_section(models, measured, load_pairs(results)), ""]
    if replicas := beside.replica_section(models, measured):
        sections += [replicas, ""]
    sections += [hand_off.section(measured), ""]
    sections += [split.section(results, files), "", _load_section(results)]
    files["benchmarks.md"] = "\n".join(sections).rstrip() + "\n"
    return files


def write(docs: Path = DOCS, results: Path = RESULTS, gpu_hour_price: float = PRICE) -> list[Path]:
    """Write the page and its plots; returns what was written."""
    written = []
    for name, text in render(results, gpu_hour_price).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def _model_section(
    model: CostModel, measured: Sequence[Record], gpu_hour_price: float, files: dict[str, str]
) -> str:
    points = grid(model, LAYOUTS).points
    figures = [figure(point, model, measured, gpu_hour_price) for point in points]
    prefill = [each for each in figures if each.point.bench != BENCH_DECODE]
    known = sum(each.measured for each in figures)
    parts = [
        f"## {model.model}\n",
        f"{known} of {len(figures)} figures measured.\n",
        "### Prefill, batch 1: time to the first token, and $ per million input tokens\n",
        markdown.prefill_table(prefill),
        "",
    ]
    for context in CONTEXTS:
        decode = [each for each in figures if each.point.context == context]
        name = f"plots/{model.model}-decode-{context}.svg"
        title = f"{model.model}, decode at {context:,} tokens of context"
        files[name] = _decode_chart(title, decode)
        parts += [
            f"### Decode at {context:,} tokens of context: step, and $ per million output tokens, by batch\n",
            markdown.decode_table(decode),
            f"\n![{title}: price against speed]({name})\n",
            "Pareto front, the points that no other beats in both speed and price:\n",
            markdown.pareto_table(decode),
            "",
            markdown.measured_front(decode),
            "",
        ]
    return "\n".join(parts)


def _decode_chart(title: str, figures: Sequence[Figure]) -> str:
    """Price against speed per user; a line is dashed as soon as one of its points is predicted."""
    series = []
    for layout, mine in by_layout(figures).items():
        points = [(each.tokens_per_s_user, each.price_per_million) for each in mine]
        predicted = not all(each.measured for each in mine)
        label = f"{layout.name}, predicted" if predicted else layout.name
        series.append(Series(label, points, dashed=predicted))
    best = pareto_front(figures)
    front = [(each.tokens_per_s_user, each.price_per_million) for each in best]
    series.append(Series("Pareto front", front, dashed=not all(each.measured for each in best), marks=False))
    x = Axis("tokens per second per user", log=True)
    return Chart(title, x, Axis("$ per million output tokens", log=True), tuple(series)).render() + "\n"


def _load_section(results: Path) -> str:
    """Runs of ``antiphon bench serve`` that were kept as ``serve-*.json``."""
    rows = []
    for path in sorted(results.glob("serve-*.json")):
        rows.append(_load_row(path))
    if not rows:
        return "## Load over HTTP\n\nNo runs of `antiphon bench serve` have been kept yet."
    head = [
        "run",
        "model",
        "offered/s",
        "answered",
        "TTFT p50 / p99 ms",
        "ITL p50 / p99 ms",
        "output tokens/s",
    ]
    return "\n".join(["## Load over HTTP\n", markdown.table([*head, "goodput"], rows)])


def _load_row(path: Path) -> list[str]:
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        latency, good = run["latency_s"], run["goodput"]
        return [
            path.stem.removeprefix("serve-"),
            str(run["asked"]["model"]),
            f"{run['rates']['offered_requests_per_s']:.2f}",
            f"{run['requests']['answered']} of {run['requests']['measured']}",
            _pair(latency["ttft"]),
            _pair(latency["itl"]),
            f"{run['rates']['output_tokens_per_s']:,.0f}",
            "<br>".join(f"{each['share']:.1%} ({each['objectives']})" for each in good) or "–",
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: no report of a load: {type(error).__name__} {error}") from error


def _pair(summary: dict[str, float | None]) -> str:
    p50, p99 = summary["p50"], summary["p99"]
    return "–" if p50 is None or p99 is None else f"{p50 * 1e3:,.1f} / {p99 * 1e3:,.1f}"


if __name__ == "__main__":
    for each in write():
        print(each)
