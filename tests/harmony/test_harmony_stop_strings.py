"""Stop texts and finish reasons of chat answers, over the real parser."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from antiphon.router.formatter import ContentDelta, ReasoningDelta
from antiphon.router.harmony.parser import HarmonyParser
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary
from antiphon.router.lifecycle import EndKind
from antiphon.router.openai.chat_answer import ChatAnswer

FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f json<|message|>{"a":1}'


def _answer(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    kind: EndKind,
    stops: Sequence[str] = (),
    forced: bool = False,
) -> tuple[str, str, str]:
    """Content, reasoning and finish reason of an answer that comes one token at a time."""
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy())
    answer = ChatAnswer(parser, stops, vocabulary.pieces.__getitem__, forced_call=forced)
    shown = [one for token in token_ids for one in answer.feed([token], None)]
    shown += answer.finish(kind)
    content = "".join(one.delta.text for one in shown if isinstance(one.delta, ContentDelta))
    reasoning = "".join(one.delta.text for one in shown if isinstance(one.delta, ReasoningDelta))
    return content, reasoning, answer.finish_reason(kind)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["END"], "abc "),
        (["ND", "zzz"], "abc E"),
        (["END d", "END"], "abc "),
        (["def"], "abc END "),
        (["END!"], None),
    ],
)
def test_a_stop_text_split_over_tokens(
    vocabulary: Vocabulary, stops: list[str], expected: str | None
) -> None:
    token_ids = vocabulary.encode_marked(FINAL + "abc ")
    token_ids += [
        *vocabulary.encode("E"),
        *vocabulary.encode("ND"),
        *vocabulary.encode_marked(" def<|return|>"),
    ]
    content, _, finish_reason = _answer(vocabulary, token_ids, EndKind.STOP, stops)
    assert content == (expected if expected is not None else "abc END def")
    assert finish_reason == "stop"


def test_a_stop_text_is_not_looked_for_in_reasoning(vocabulary: Vocabulary) -> None:
    text = "<|channel|>analysis<|message|>at the END<|end|><|start|>assistant" + FINAL + "ok<|return|>"
    answer = _answer(vocabulary, vocabulary.encode_marked(text), EndKind.STOP, ["END"])
    assert answer == ("ok", "at the END", "stop")


@pytest.mark.parametrize(
    ("text", "kind", "forced", "finish_reason"),
    [
        (CALL + "<|call|>", EndKind.STOP, False, "tool_calls"),
        (CALL, EndKind.STOP, False, "tool_calls"),
        (CALL, EndKind.LENGTH, False, "length"),
        (CALL + "<|call|>", EndKind.STOP, True, "stop"),
        (FINAL + "ok<|return|>", EndKind.STOP, False, "stop"),
        ("<|channel|>analysis<|message|>long", EndKind.LENGTH, False, "length"),
    ],
)
def test_finish_reasons(
    vocabulary: Vocabulary, text: str, kind: EndKind, forced: bool, finish_reason: str
) -> None:
    assert _answer(vocabulary, vocabulary.encode_marked(text), kind, forced=forced)[2] == finish_reason
