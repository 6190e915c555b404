"""The page's section of prefill/decode split against colocated engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.benchmarks.report.markdown import table
from antiphon.benchmarks.split.command import cells
from antiphon.benchmarks.split.observed import LoadRun, load_runs
from antiphon.benchmarks.split.verdict import comparison, curve, sentence
from antiphon.benchmarks.svg import Axis, Chart, Series

HEAD = """## The split against colocated engines

From real HTTP load on the same GPUs behind the same router. Goodput is the most requests per second that kept
both limits in a run in which at least {attainment:.0%} of all did; the limit of ITL is on each request's own
99th percentile. For each limit the colocated engines have the prefill chunk that serves them best. Latencies
are those of the run that showed the goodput. Replicas of another system, one on each GPU, take sessions in
turn, and answer without tokenizing or detokenizing anything.
"""
TTFT_MS = 1000.0
ITL_MS = (10.0, 20.0, 50.0)
CURVE_MS = (5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 50.0, 70.0, 100.0)
ATTAINMENT = 0.9


def section(results: Path, files: dict[str, str]) -> str:
    """All comparisons of ``split*.json``; plots are added to ``files``."""
    runs = [run for path in sorted(results.glob("split*.json")) for run in load_runs(path)]
    gpu = [run for run in runs if run.device != "CPU"]
    head = HEAD.format(attainment=ATTAINMENT)
    if not gpu:
        return head + "\nNot measured on GPUs yet."
    parts = [head]
    for model, device, gpus in sorted({(run.model, run.device, run.gpus) for run in gpu}):
        mine = [run for run in gpu if (run.model, run.device, run.gpus) == (model, device, gpus)]
        parts.append(f"### {model} on {gpus} x {device}\n")
        for mix, tokens_in, tokens_out in dict.fromkeys(
            (r.mix, r.input_tokens, r.output_tokens) for r in mine
        ):
            parts.append(_mix(model, mix, f"{tokens_in:,} in, {tokens_out:,} out", mine, files))
    return "\n".join(parts)


def _mix(model: str, mix: str, lengths: str, runs: Sequence[LoadRun], files: dict[str, str]) -> str:
    mine = [run for run in runs if run.mix == mix]
    rows = comparison(mine, TTFT_MS, ITL_MS, ATTAINMENT)
    name = f"plots/split-{model}-{mix}.svg"
    series = [
        Series(arrangement, curve(mine, arrangement, TTFT_MS, CURVE_MS, ATTAINMENT))
        for arrangement in dict.fromkeys(row.arrangement for row in rows)
    ]
    title = f"{model}, {mix}: goodput at TTFT within {TTFT_MS / 1e3:g} s"
    x, y = Axis("limit of ITL, ms", log=True), Axis("good requests per second")
    files[name] = Chart(title, x, y, tuple(series)).render() + "\n"
    head = [
        "ITL limit",
        "arrangement",
        "goodput/s",
        "TTFT p50 / p99 ms",
        "ITL p50 / p99 ms",
        "against the split",
    ]
    complaints = sorted({complaint for run in mine for complaint in run.complaints})
    notes = (
        [f"The load generator complained in some of these runs: {'; '.join(complaints)}."]
        if complaints
        else []
    )
    return "\n".join(
        [
            f"{mix} ({lengths}):\n",
            table(head, [cells(row) for row in rows]),
            f"\n![{title}]({name})\n",
            sentence(mix, rows),
            *notes,
            "",
        ]
    )
