"""What is said of FP8 pages' precision, and the page that says it."""

from __future__ import annotations

import pytest
import torch

from antiphon.benchmarks.fp8_pages import BOUND, wrong
from antiphon.benchmarks.kv_precision import PAGES, answers, attention_errors, teacher_forced
from antiphon.benchmarks.report.precision_page import PAGE, page_with, read_figures
from antiphon.demo.cached_checkpoint import ensure_demo_checkpoint
from antiphon.demo.dataset import held_out_examples
from antiphon.demo.harmony import ENCODINGS_VARIABLE
from antiphon.demo.questions import question_of
from antiphon.demo.score import prompt_of
from antiphon.model.checkpoint.load import load_model
from antiphon.protocol.errors import AntiphonError
from antiphon.router.harmony.vocabulary import ranks_path

KEPT = "e4m3, a bfloat16 scale a token"


def test_the_scale_that_is_kept_is_best_where_few_coordinates_are_large() -> None:
    errors = {str(point["numbers"]): point["errors"] for point in attention_errors(tokens=512, queries=16)}
    for kind in ("heavy tails", "outlier coordinates"):
        found = errors[kind]
        assert isinstance(found, dict)
        others = [error for name, error in found.items() if name.startswith("e4m3") and name != KEPT]
        assert found["bfloat16"] < found[KEPT] < min(others)
    normal = errors["normal"]
    assert isinstance(normal, dict)
    assert normal[KEPT] < 0.08


def test_the_demo_model_says_the_same_with_fp8_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENCODINGS_VARIABLE, str(ranks_path().parent))
    model = load_model(ensure_demo_checkpoint(), torch.float32)
    skills = ("facts", "tools", "arithmetic")
    questions = [question_of(example) for example in held_out_examples(7, 1)]
    prompts = [prompt_of(question) for question in questions if question.skill in skills]
    assert len(prompts) == len(skills)
    spoken = {pages: answers(model, pages, prompts) for pages in ("bfloat16", "fp8_e4m3")}
    same = sum(a == b for a, b in zip(*spoken.values(), strict=True))
    assert same >= 2
    found = teacher_forced(model, list(zip(prompts, spoken["bfloat16"], strict=True)))
    assert set(found) == set(PAGES)
    assert found["float32"]["relative_l2"] == 0.0
    assert 0.0 < found["bfloat16"]["relative_l2"] < found["fp8_e4m3"]["relative_l2"] < 0.05
    for each in found.values():
        assert each["positions"] > 30
        assert each["same"] >= 0.99 * each["positions"]


def test_the_page_is_as_the_figures_make_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(page, read_figures()) == page, "run `make docs`"
    with pytest.raises(AntiphonError, match="no part between"):
        page_with("nothing", read_figures())


def test_a_kernel_that_is_wrong_is_no_measurement() -> None:
    assert not any(wrong(row) for row in ({"what": "step"}, {"error": None}, {"error": BOUND}))
    assert all(wrong({"error": error}) for error in (2 * BOUND, float("nan")))
