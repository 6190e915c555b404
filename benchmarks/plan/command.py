"""``antiphon plan``: the plans for a target, what they rest on, and what the simulation makes of the best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from antiphon.benchmarks import records
from antiphon.benchmarks.plan.check import SCENARIOS, Checked, check, grown, warmup_of
from antiphon.benchmarks.plan.cost_model import LARGER, SMALLER, CostModel, build
from antiphon.benchmarks.plan.fit import Errors
from antiphon.benchmarks.plan.planner import Plan, Targets, plans
from antiphon.benchmarks.serve.outputs import check_writable

SHOWN = 8
LOG_WIDTH = 130


def run_command(
    model_name: str,
    targets: Targets,
    *,
    results: Path = records.RESULTS,
    duration_s: float = 300.0,
    simulate: bool = True,
    output: Path | None = None,
) -> None:
    """Print the plans and the simulation of the first; write everything as JSON where asked.

    Raises:
        NoPlan: no layout meets the targets.
        ConfigError: no such model.
        RecordError: a file of results cannot be read.
        OutputUnusable: ``output`` could not be written; nothing is computed.
    """
    check_writable(output)
    model = build(model_name, records.load_results(results))
    found = plans(model, targets)
    # Without a terminal a table is as wide as it needs to be for a log.
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    _print_plans(console, model, found)
    _print_basis(console, model, found[0])
    checked: list[Checked] = []
    larger: Plan | None = None
    if simulate:
        with Console(stderr=True).status("simulating") if sys.stderr.isatty() else console.capture():
            warmup_s = warmup_of(found[0], duration_s)
            checked = check(model, found[0], duration_s=duration_s, warmup_s=warmup_s)
            if not all(each.holds for each in checked):
                last = next(
                    s
                    for s, each in zip(reversed(SCENARIOS), reversed(checked), strict=True)
                    if not each.holds
                )
                larger = grown(model, found[0], last, duration_s=duration_s, warmup_s=warmup_s)
        _print_check(console, targets, checked)
        _print_growth(console, found[0], checked, larger)
    if output is not None:
        records.write_json(output, document(model, found, checked, larger))


def document(
    model: CostModel, found: Sequence[Plan], checked: Sequence[Checked], larger: Plan | None
) -> dict[str, Any]:
    """Everything that the command prints, as JSON; times in seconds."""
    return {
        "bench": "plan",
        "model": model.model,
        "gpu": model.gpu.name,
        "commit": records.checkout_commit(),
        "date": records.now(),
        "predicted": True,
        "targets": asdict(found[0].targets),
        "plans": [_plan_document(plan) for plan in found],
        "basis": basis(model, found[0]),
        "simulation": [asdict(each) for each in checked],
        "grown": None if larger is None else _plan_document(larger),
    }


def basis(model: CostModel, plan: Plan) -> list[dict[str, Any]]:
    """Of each kernel class of a plan: how many points its law rests on, and its error on held-out ones."""
    decode, prefill = (model.assumed_classes(each.layout) for each in (plan.decode, plan.prefill))
    assumed = {*decode["decode"], *prefill["prefill"]}
    rows: list[dict[str, Any]] = []
    for kind, law in model.efficiencies.laws.items():
        held_out = None if law.held_out is None else asdict(law.held_out)
        if law.measured or kind in assumed:
            rows.append({"class": str(kind), "points": law.points, "held_out": held_out})
    for name, whole in (("decode step", model.decode_correction), ("prefill", model.prefill_correction)):
        for kind_of, errors in (
            ("", whole.held_out),
            (" (other layouts from TP1)", whole.layout_held_out),
            (f" ({LARGER} from {SMALLER})", whole.model_held_out),
        ):
            if errors is not None:
                row = {"class": f"whole {name}{kind_of}", "points": errors.points}
                rows.append(row | {"held_out": asdict(errors)})
    return rows


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {
        **asdict(plan),
        "gpus": plan.gpus,
        "ttft_s": plan.ttft_s,
        "input_price_per_million": plan.input_price,
        "output_price_per_million": plan.output_price,
    }


def _print_plans(console: Console, model: CostModel, found: Sequence[Plan]) -> None:
    targets = found[0].targets
    title = (
        f"{model.model} on {model.gpu.name}: {targets.requests_per_s:g} requests/s of "
        f"{targets.input_tokens} + {targets.output_tokens} tokens; every figure is predicted"
    )
    table = Table(
        "GPUs", "prefill", "decode", "batch", "step ms", "TTFT ms", "$/M in", "$/M out", title=title
    )
    for plan in found[:SHOWN]:
        prefill, decode = plan.prefill, plan.decode
        table.add_row(
            str(plan.gpus),
            f"{prefill.workers} x {prefill.layout.name} ({prefill.utilisation:.0%} busy)",
            f"{decode.workers} x {decode.layout.name}",
            f"{decode.mean_batch:.1f} of {decode.batch}",
            f"{decode.step_s * 1e3:.2f}",
            f"{plan.ttft_s * 1e3:.0f}",
            f"{plan.input_price:.3f}",
            f"{plan.output_price:.3f}",
        )
    console.print(table)
    best = found[0]
    console.print(
        f"Best: {best.prefill.workers} prefill and {best.decode.workers} decode workers, {best.gpus} GPUs, "
        f"${best.gpus * targets.gpu_hour_price:,.2f} an hour (TTFT at p{targets.quantile * 100:.0f})."
    )


def _print_basis(console: Console, model: CostModel, plan: Plan) -> None:
    table = Table("what the figures rest on", "points", "held-out error: median", "worst")
    for row in basis(model, plan):
        errors = Errors(**row["held_out"]) if row["held_out"] else None
        table.add_row(
            row["class"],
            str(row["points"]) if row["points"] else "assumed",
            f"{errors.median:.1%}" if errors else "–",
            f"{errors.worst:.1%}" if errors else "–",
        )
    console.print(table)


def _print_check(console: Console, targets: Targets, checked: Sequence[Checked]) -> None:
    name = f"p{targets.quantile * 100:.0f}"
    table = Table(
        "simulated",
        f"TTFT {name} ms",
        f"ITL {name} ms",
        "prefill busy",
        "decode places",
        "requests",
        "targets",
    )
    for each in checked:
        table.add_row(
            each.scenario,
            f"{each.ttft_s * 1e3:.0f}",
            f"{each.itl_s * 1e3:.2f}",
            f"{each.outcome.prefill_utilisation:.0%}",
            f"{each.outcome.decode_utilisation:.0%}",
            f"{each.outcome.requests:,}",
            "held" if each.holds else "missed",
        )
    console.print(table)


def _print_growth(console: Console, plan: Plan, checked: Sequence[Checked], larger: Plan | None) -> None:
    missed = [each.scenario for each in checked if not each.holds]
    if not missed:
        return
    if larger is None:
        console.print(f"'{missed[-1]}' is missed even with many more workers: it needs another layout.")
        return
    console.print(
        f"'{missed[-1]}' is held by {larger.prefill.workers} prefill and {larger.decode.workers} decode "
        f"workers, {larger.gpus} GPUs instead of {plan.gpus}."
    )
