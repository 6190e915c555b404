"""What a parser promises about its deltas, besides the text they add up to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
)
from antiphon.router.formatter import (
    ContentDelta,
    OutputRegion,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.parser import HEADER_LIMIT_BYTES, HarmonyParser
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary

FINAL = "<|channel|>final<|message|>"
TWO_CALLS = (
    ' to=functions.f<|channel|>commentary json<|message|>{"n":1}<|call|><|start|>assistant'
    ' to=functions.g<|channel|>commentary json<|message|>{"n":2}<|call|>'
)


def test_each_token_of_content_is_shown_at_once(vocabulary: Vocabulary) -> None:
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy())
    assert parser.feed(vocabulary.encode_marked(FINAL)) == []
    for token in vocabulary.encode("The quick brown fox."):
        assert parser.feed([token]) == [ContentDelta(vocabulary.decode([token]))]
    assert parser.feed(vocabulary.encode_marked("<|return|>")) == []


def test_a_step_of_several_tokens_loses_none(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    text = "<|channel|>analysis<|message|>one two<|end|><|start|>assistant" + FINAL + "three four<|return|>"
    token_ids = vocabulary.encode_marked(text)
    assert parse_tokens(token_ids).deltas == [ReasoningDelta("one two"), ContentDelta("three four")]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_change_nothing(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any], seed: int
) -> None:
    token_ids = vocabulary.encode_marked(
        "I must<|end|><|start|>assistant<|channel|>analysis<|message|>t👨‍👩‍👧‍👦<|end|><|start|>assistant"
        + TWO_CALLS
        + "<|start|>assistant"
        + FINAL
        + "é ok 🇩🇪<|return|>"
    )
    order = random.Random(seed)
    steps = [order.randint(1, 9) for _ in token_ids]
    assert parse_tokens(token_ids, steps).merged == parse_tokens(token_ids).merged


def test_no_delta_holds_part_of_a_code_point(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    family = "👨‍👩‍👧‍👦"
    token_ids = vocabulary.encode_marked(FINAL + family + "<|return|>")
    answer = parse_tokens(token_ids, [1])
    assert len(vocabulary.encode(family)) > len(answer.deltas) > 1
    assert answer.content == family
    assert all("�" not in delta.text for delta in answer.deltas)


def test_invalid_bytes_become_replacement_characters(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    token_ids = [*vocabulary.encode_marked(FINAL), 9552, 9552, *vocabulary.encode("a")]
    answer = parse_tokens(token_ids, [1])
    assert answer.content == b"".join([vocabulary.pieces[9552]] * 2).decode("utf-8", "replace") + "a"
    assert "�" in answer.content


def test_a_code_point_cut_by_the_end_is_replaced_and_counted(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    emoji = vocabulary.encode("🫠")
    assert len(emoji) > 1
    answer = parse_tokens([*vocabulary.encode_marked(FINAL + "a"), *emoji[:-1]], reason=FinishReason.LENGTH)
    assert answer.content == "a�"
    assert answer.outcome.repairs == {"code_point_cut": 1}


def test_ids_outside_the_vocabulary_are_replaced(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    answer = parse_tokens([*vocabulary.encode_marked(FINAL + "a"), -1, vocabulary.size, 10**12])
    assert answer.content == "a���"
    assert answer.outcome.repairs == {"unknown_token": 3}


def test_calls_start_once_with_unique_ids(vocabulary: Vocabulary, parse_tokens: Callable[..., Any]) -> None:
    answer = parse_tokens(vocabulary.encode_marked(TWO_CALLS), [1])
    starts = [delta for delta in answer.deltas if isinstance(delta, ToolCallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "f"), (1, "g")]
    assert len({start.id for start in starts}) == 2
    assert all(start.id.startswith("call_") and len(start.id) > 20 for start in starts)
    assert all(isinstance(delta, ToolCallStart | ToolCallArgumentsDelta) for delta in answer.deltas)
    assert answer.outcome.tool_calls == 2


def test_arguments_on_the_analysis_channel_are_never_reasoning(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    token_ids = vocabulary.encode_marked(
        '<|channel|>analysis to=functions.f code<|message|>{"path":""}<|call|>'
    )
    answer = parse_tokens(token_ids, [1])
    assert answer.reasoning == ""
    assert answer.calls == [["f", '{"path":""}']]
    assert answer.outcome.reasoning_tokens == 0


def test_regions_and_reasoning_tokens(vocabulary: Vocabulary) -> None:
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy())
    assert parser.region is OutputRegion.STRUCTURE
    text = (
        "<|channel|>analysis<|message|>so it is<|end|><|start|>assistant"
        + FINAL
        + "yes<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    )
    regions: dict[OutputRegion, list[int]] = {region: [] for region in OutputRegion}
    for token in vocabulary.encode_marked(text):
        parser.feed([token])
        regions[parser.region].append(token)
    assert vocabulary.decode(regions[OutputRegion.REASONING]) == "so it is"
    assert vocabulary.decode(regions[OutputRegion.CONTENT]) == "yes"
    assert vocabulary.decode(regions[OutputRegion.TOOL_CALL]) == "{}"
    assert parser.finish(FinishReason.STOP).reasoning_tokens == len(vocabulary.encode("so it is"))


def test_headless_text_is_held_back_only_so_far(vocabulary: Vocabulary) -> None:
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy())
    text = "The moon is made of green cheese. " * 40
    fed = shown = ""
    for token in vocabulary.encode(text):
        fed += vocabulary.decode([token])
        shown += "".join(delta.text for delta in parser.feed([token]) if isinstance(delta, ContentDelta))
        assert shown == (fed if len(fed) > HEADER_LIMIT_BYTES else "")
    assert shown == text


def test_json_behind_a_header_without_message_marker_streams(vocabulary: Vocabulary) -> None:
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy())
    assert parser.feed(vocabulary.encode_marked("<|channel|>final")) == []
    assert parser.feed(vocabulary.encode(' {"a')) == [ContentDelta('{"a')]


def test_parsers_of_one_prompt_do_not_share_state(formatter: HarmonyFormatter) -> None:
    prompt = formatter.render(Conversation((ChatMessage(MessageRole.USER, "hello"),)))
    first, second = formatter.parser(prompt), formatter.parser(prompt)
    first.feed(formatter.vocabulary.encode_marked("<|channel|>analysis<|message|>a"))
    assert second.feed(formatter.vocabulary.encode_marked(FINAL + "b")) == [ContentDelta("b")]
    assert first.finish(FinishReason.STOP).reasoning_tokens == 1
    assert second.finish(FinishReason.STOP).reasoning_tokens == 0
