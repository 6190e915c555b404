"""The figures of ``docs/kv-precision.md``, made from what ``benchmarks/kv_precision.py`` wrote.

``python -m antiphon.benchmarks.report.precision_page`` rewrites them; none is typed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.kv_precision import OUT
from antiphon.benchmarks.report.markdown import table
from antiphon.protocol.errors import AntiphonError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kv-precision.md"
BEGIN, END = "<!-- made by antiphon.benchmarks.report.precision_page: {} -->\n", "<!-- end -->\n"


def attention_table(figures: dict[str, Any]) -> str:
    """Relative L2 of attention by kind of scale (rows) and of numbers (columns)."""
    points: Sequence[dict[str, Any]] = figures["attention"]
    rows = [[kind, *(f"{point['errors'][kind]:.2%}" for point in points)] for kind in points[0]["errors"]]
    return table(["pages", *(str(point["numbers"]) for point in points)], rows)


def texts_table(figures: dict[str, Any]) -> str:
    """Agreement on texts with float32 pages."""
    pages: dict[str, dict[str, float]] = figures["teacher_forced"]["pages"]
    rows = [
        [
            name,
            f"{each['same']:,} of {each['positions']:,}: {each['same'] / each['positions']:.2%}",
            f"{each['relative_l2']:.2%}",
        ]
        for name, each in pages.items()
        if name != "float32"
    ]
    return table(["full layers", "same best token as with float32 pages", "logits, relative L2"], rows)


def scores_table(figures: dict[str, Any]) -> str:
    """Right answers by skill."""
    scores: dict[str, dict[str, list[int]]] = figures["scores"]
    kinds = list(scores)
    rows = [
        [f"`{skill}`", *(f"{scores[kind][skill][0]} of {scores[kind][skill][1]}" for kind in kinds)]
        for skill in sorted(scores[kinds[0]])
    ]
    right = [sum(score[0] for name, score in scores[kind].items() if name != "well_formed") for kind in kinds]
    total = sum(score[1] for name, score in scores[kinds[0]].items() if name != "well_formed")
    rows.append(["all", *(f"{count} of {total}" for count in right)])
    made = f"{figures['same_answers']} of {figures['answers']} answers are the same, token for token."
    return f"{table(['skill', *kinds], rows)}\n\n{made}\n"


TABLES = {"attention": attention_table, "texts": texts_table, "scores": scores_table}


def page_with(page: str, figures: dict[str, Any]) -> str:
    """The page with the parts between its markers made anew.

    Raises:
        AntiphonError: a part is missing.
    """
    for name, make in TABLES.items():
        begin = BEGIN.format(name)
        before, found, rest = page.partition(begin)
        _, end, after = rest.partition(END)
        if not found or not end:
            raise AntiphonError(f"{PAGE}: no part between {begin.strip()} and {END.strip()}")
        page = f"{before}{begin}\n{make(figures).strip()}\n\n{END}{after}"
    return page


def read_figures(path: Path = OUT) -> dict[str, Any]:
    """What was measured."""
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def main() -> None:
    """Rewrite the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with(page, read_figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
