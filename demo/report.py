"""The score table of ``docs/demo-model.md``, made from the metrics that training left behind.

``python -m antiphon.demo.report`` rewrites it; nothing in it is typed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from antiphon.demo.cached_checkpoint import PACKED_FILE
from antiphon.demo.evaluate import TARGETS
from antiphon.demo.shape import MODEL_NAME, TINY
from antiphon.demo.vocabulary import FULL_VOCABULARY, load_vocabulary
from antiphon.protocol.errors import AntiphonError

METRICS_FILE = Path(__file__).with_name(f"{MODEL_NAME}.metrics.json")
"""What ``train.py`` wrote when it made the shipped weights."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "demo-model.md"
BEGIN, END = "<!-- made by antiphon.demo.report -->\n", "<!-- end -->\n"
SPELLABLE = (
    "The middle column leaves out the questions whose right answer, or the thought before it, holds a word "
    "that the model has no row for; questions are now drawn without those."
)
LABELS = {
    "facts": "facts",
    "arithmetic": "arithmetic",
    "copying": "repeat, reverse, count, pick words",
    "spelling": "write words with underscores, dots, capitals, as a list",
    "multi_turn": "conversations of several turns",
    "tools": "weather function: right call, or right answer from its result",
    "tools_unseen": "functions whose names training never showed",
    "no_call": "functions on offer, none fits",
    "refusal": "refusal of what it was not taught",
    "chat": "greetings, what it is, the date",
    "effort": "thought grows from low over medium to high",
    "well_formed": "openai-harmony's strict parser accepts it",
}


def page_with_scores(page: str, metrics: dict[str, Any]) -> str:
    """The page with the part between the markers made anew.

    Raises:
        AntiphonError: the page has no such part.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise AntiphonError(f"{PAGE}: no part between {BEGIN.strip()} and {END.strip()}")
    return before + begin + _figures(metrics) + end + after


def _figures(metrics: dict[str, Any]) -> str:
    scores, spellable = metrics["scores"], metrics.get("spellable_scores")
    head = ["skill", "right", *(["of those it can spell"] if spellable else []), "target"]
    lines = ["", f"| {' | '.join(head)} |", f"|---|{'---|' * (len(head) - 1)}"]
    for name, label in LABELS.items():
        cells = [f"{label} (`{name}`)", _share(scores[name])]
        if spellable:
            cells.append(_share(spellable[name]) if name in spellable else "")
        cells.append(f"{TARGETS[name]:.1%}" if name in TARGETS else "")
        lines.append(f"| {' | '.join(cells)} |")
    rows = len(load_vocabulary().token_ids)
    run = [
        f"{metrics['steps']:,} steps, {metrics['tokens'] / 1e6:,.0f} million tokens in",
        f"{metrics['seconds']:.0f} s on one H200, seed {metrics['seed']}, torch {metrics['torch']}.",
        f"{metrics['parameters'] / 1e6:.1f} million trained parameters: {TINY.num_hidden_layers} layers of",
        f"{TINY.num_experts} experts, hidden size {TINY.hidden_size},",
        f"and {rows:,} of {FULL_VOCABULARY:,} vocabulary rows.",
        f"Packed: {PACKED_FILE.stat().st_size / 1e6:.1f} MB.",
    ]
    if spellable:
        lines += ["", *_wrapped(SPELLABLE)]
    return "\n".join([*lines, "", *_wrapped(" ".join(run)), "", ""])


def _share(score: list[int]) -> str:
    right, total = score
    return f"{right} of {total:,}: {right / total:.1%}"


def _wrapped(text: str, width: int = 118) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def read_metrics() -> dict[str, Any]:
    """The metrics of the shipped weights."""
    metrics: dict[str, Any] = json.loads(METRICS_FILE.read_text(encoding="utf-8"))
    return metrics


def main() -> None:
    """Rewrite the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_scores(page, read_metrics()), encoding="utf-8")


if __name__ == "__main__":
    main()
