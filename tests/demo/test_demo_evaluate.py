"""Judging answers: what counts as right, and question sets as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.demo import harmony
from antiphon.demo.dialogue import AssistantTurn, Effort, Expect, ToolCall
from antiphon.demo.evaluate import (
    Score,
    effort_score,
    evaluate,
    is_right,
    judge,
    read_questions,
    table,
    write_questions,
)
from antiphon.demo.questions import Question
from antiphon.protocol.errors import AntiphonError

pytestmark = pytest.mark.usefixtures("harmony_vocabulary")

ASK = ({"role": "user", "content": "What is the capital of France?"},)


def said(text: str) -> AssistantTurn:
    return AssistantTurn("thought", text)


def called(name: str, arguments: str) -> AssistantTurn:
    return AssistantTurn("thought", call=ToolCall(name, arguments))


@pytest.mark.parametrize(
    ("expect", "reply", "right"),
    [
        (Expect(contains=("Paris",)), said("The capital of France is Paris."), True),
        (Expect(contains=("Paris",)), said("It is paris"), True),
        (Expect(contains=("Paris",)), said("It is Parisian."), False),
        (Expect(contains=("= 85",)), said("47 + 38 = 85"), True),
        (Expect(contains=("= 85",)), said("47 + 38 = 850"), False),
        (Expect(contains=("Paris", "Euro")), said("Paris"), False),
        (Expect(contains=("Paris",)), called("f", "{}"), False),
        (Expect(equals="a b c"), said("A b  c."), True),
        (Expect(equals="a b c"), said("a b c d"), False),
        (Expect(refusal=True), said("I'm sorry, I don't know that."), True),
        (Expect(refusal=True), said("It is 42."), False),
        (Expect(call=ToolCall("f", '{"a": 1}')), called("f", '{"a":1}'), True),
        (Expect(call=ToolCall("f", '{"a": "Oslo"}')), called("f", '{"a": "oslo"}'), True),
        (Expect(call=ToolCall("f", '{"a": 1}')), called("f", '{"a": "1"}'), False),
        (Expect(call=ToolCall("f", '{"a": 1}')), called("f", '{"a": 1, "b": 2}'), False),
        (Expect(call=ToolCall("f", '{"a": 1}')), called("f", '{"a": 1'), False),
        (Expect(call=ToolCall("f", "{}")), called("g", "{}"), False),
        (Expect(call=ToolCall("f", "{}")), said("f"), False),
    ],
)
def test_what_counts_as_right(expect: Expect, reply: AssistantTurn, right: bool) -> None:
    assert is_right(expect, reply) is right


def answer(text: str) -> list[int]:
    tokens: list[int] = harmony.encoding().encode(text, allowed_special="all")
    return tokens


GOOD = (
    "<|channel|>analysis<|message|>It is Paris.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Paris<|return|>"
)


@pytest.mark.parametrize(
    ("text", "well_formed", "right"),
    [
        (GOOD, True, True),
        (GOOD.replace("Paris<", "Rome<"), True, False),
        ("<|channel|>analysis<|message|>Paris", False, False),
        ("<|channel|>final<|message|>Paris<|end|><|return|>", False, False),
        ("Paris", False, False),
    ],
)
def test_judging_raw_tokens_repairs_nothing(text: str, well_formed: bool, right: bool) -> None:
    verdict = judge(Question("facts", ASK, Expect(contains=("Paris",))), answer(text))
    assert (verdict.well_formed, verdict.right) == (well_formed, right)


def test_the_table_counts_per_skill() -> None:
    questions = [
        Question("facts", ASK, Expect(contains=("Paris",))),
        Question("chat", ASK, Expect(contains=("x",))),
    ]
    verdicts = evaluate(questions, lambda asked: [answer(GOOD) for _ in asked])
    assert table(verdicts) == {"facts": Score(1, 1), "chat": Score(0, 1), "well_formed": Score(2, 2)}


def test_effort_counts_questions_whose_thought_grows() -> None:
    thoughts = {Effort.LOW: "a", Effort.MEDIUM: "a b", Effort.HIGH: "a b c"}

    def grow(questions: object) -> list[list[int]]:
        assert isinstance(questions, list)
        return [answer(GOOD.replace("It is Paris.", thoughts[q.effort])) for q in questions]

    questions = [Question("facts", ASK, Expect(contains=("Paris",)))]
    assert effort_score(questions, grow) == Score(1, 1)
    assert effort_score(questions, lambda asked: [answer(GOOD) for _ in asked]) == Score(0, 1)


def test_a_question_set_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    both = [Question("facts", ASK, Expect(contains=("Paris",), refusal=True), date="2026-01-02")] * 2
    write_questions(both, path)
    assert read_questions(path) == both
    good = json.dumps(Question("facts", ASK, Expect(contains=("Paris",)), effort=Effort.LOW).to_json())
    path.write_text(f"{good}\n\n{good}\n")
    assert [q.effort for q in read_questions(path)] == [Effort.LOW, Effort.LOW]
    for bad in ("{", '{"messages": []}', good.replace('"expect"', '"expected"'), good.replace("low", "huge")):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(AntiphonError, match="line 2"):
            read_questions(path)
    with pytest.raises(AntiphonError, match="absent"):
        read_questions(tmp_path / "absent.jsonl")
