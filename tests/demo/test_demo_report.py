"""The page about the demo model says what its training measured."""

from __future__ import annotations

import pytest

from antiphon.demo.report import LABELS, PAGE, page_with_scores, read_metrics
from antiphon.protocol.errors import AntiphonError


def test_the_page_is_made_from_the_metrics() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_scores(page, read_metrics()) == page, "run `make docs`"


def test_another_score_is_another_page() -> None:
    metrics = read_metrics()
    assert set(metrics["scores"]) == set(LABELS)
    metrics["scores"]["facts"] = [1, 3]
    assert "1 of 3: 33.3%" in page_with_scores(PAGE.read_text(encoding="utf-8"), metrics)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(AntiphonError, match="no part between"):
        page_with_scores("# Nothing", read_metrics())
