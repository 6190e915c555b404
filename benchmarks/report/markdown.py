"""Tables of the page, as Markdown. What is predicted is in italics with a ``p`` behind it, everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.benchmarks.plan.cost_model import LARGER, SMALLER, CostModel
from antiphon.benchmarks.plan.efficiency import Efficiencies
from antiphon.benchmarks.plan.fit import Errors
from antiphon.benchmarks.sweep.points import BATCHES, INPUT_TOKENS
from antiphon.benchmarks.sweep.prices import Figure, by_layout, pareto_front


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def marked(text: str, measured: bool, holds_fp8: bool = False) -> str:
    """The text of a figure, marked when it is predicted, or of a worker that was told to hold FP8 experts."""
    if not measured:
        return f"*{text} p*"
    return f"{text} r" if holds_fp8 else text


def short(value: float) -> str:
    """Three significant digits, thousands whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tokens_name(tokens: int) -> str:
    """``8k`` for 8192; the longest prompt is a page short of 128k."""
    return f"{-(-tokens // 1024)}k"


def prefill_table(figures: Sequence[Figure]) -> str:
    """Milliseconds to the first token and dollars per million input tokens, by layout and prompt length."""
    rows = []
    for layout, mine in by_layout(figures).items():
        cells = {
            each.point.input_tokens: marked(
                f"{short(each.seconds * 1e3)} ms, ${each.price_per_million:.3f}",
                *(each.measured, each.holds_fp8),
            )
            for each in mine
        }
        rows.append([layout.name, *(cells.get(tokens, "–") for tokens in INPUT_TOKENS)])
    return table(["layout", *(tokens_name(tokens) for tokens in INPUT_TOKENS)], rows)


def decode_table(figures: Sequence[Figure]) -> str:
    """Milliseconds a step and dollars per million output tokens, by layout and batch."""
    rows = []
    for layout, mine in by_layout(figures).items():
        cells = {
            each.point.batch: marked(
                f"{short(each.seconds * 1e3)} ms, ${each.price_per_million:.3f}", each.measured
            )
            for each in mine
        }
        rows.append([layout.name, *(cells.get(batch, "–") for batch in BATCHES)])
    return table(["layout", *(str(batch) for batch in BATCHES)], rows)


def pareto_table(figures: Sequence[Figure]) -> str:
    """The decode points that nothing beats."""
    rows = [
        [
            each.point.layout.name,
            str(each.point.batch),
            marked(short(each.tokens_per_s_user), each.measured),
            marked(f"{each.price_per_million:.3f}", each.measured),
        ]
        for each in pareto_front(figures)
    ]
    return table(["layout", "batch", "tokens/s per user", "$/M output tokens"], rows)


def measured_front(figures: Sequence[Figure]) -> str:
    """The front of the measured points alone, as a sentence."""
    front = pareto_front(each for each in figures if each.measured)
    if not front:
        return "None of them has been measured yet."
    points = [
        f"{each.point.layout.name} x {each.point.batch} ({short(each.tokens_per_s_user)}, "
        f"${each.price_per_million:.3f})"
        for each in front
    ]
    return f"Of the measured points alone, by batch (tokens/s per user, $): {', '.join(points)}."


def efficiency_table(efficiencies: Efficiencies) -> str:
    """The law of each kernel class."""
    rows = []
    for kind, law in efficiencies.laws.items():
        rows.append(
            [
                str(kind),
                f"{law.points} points" if law.measured else "assumed",
                f"{law.launch_s * 1e6:.1f}",
                f"{law.memory:.2f}",
                f"{law.compute:.2f}",
                *_errors(law.held_out),
            ]
        )
    head = ["kernel class", "basis", "us a launch", "x bytes", "x operations", "held-out median", "worst"]
    return table(head, rows)


def step_error_table(model: CostModel) -> str:
    """Errors of whole steps on points that the fit has not seen."""
    return table(["", "predicted", "points", "median error", "worst"], step_errors(model))


def step_errors(model: CostModel) -> list[list[str]]:
    """The rows of that table."""
    rows = []
    for name, whole in (("decode step", model.decode_correction), ("prompt", model.prefill_correction)):
        rows.append([name, "each point from all others", str(whole.points), *_errors(whole.held_out)])
        points = str(whole.layout_points)
        rows.append([name, "other layouts from TP1 alone", points, *_errors(whole.layout_held_out)])
        points = str(whole.model_points)
        rows.append([name, f"{LARGER} from {SMALLER} alone", points, *_errors(whole.model_held_out)])
    return rows


def _errors(errors: Errors | None) -> list[str]:
    return ["–", "–"] if errors is None else [f"{errors.median:.1%}", f"{errors.worst:.1%}"]
