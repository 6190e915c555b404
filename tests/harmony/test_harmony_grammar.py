"""Answers that must have a form: what a grammar lets a model write, and that it is nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from antiphon.engine.grammar import GrammarState
from antiphon.engine.grammar_compiler import GrammarCompiler, GrammarError
from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ResponseFormat,
    ResponseFormatKind,
    ToolChoice,
    ToolChoiceMode,
    ToolDefinition,
)
from antiphon.router.formatter import ContentDelta, ToolCallArgumentsDelta, ToolCallStart
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.markers import CALL, END, FIRST_SPECIAL, RETURN
from antiphon.router.harmony.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bb"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
JSON = ResponseFormat(ResponseFormatKind.JSON_SCHEMA, "verdict", None, SCHEMA)
GET = ToolDefinition("get", None, SCHEMA)
GET_WEATHER = ToolDefinition("get_weather", None, None)
STRICT = ToolDefinition("get", None, SCHEMA, strict=True)
REQUIRED, NAMED = ToolChoice(ToolChoiceMode.REQUIRED), ToolChoice(ToolChoiceMode.NAMED, "get")
THINK = "<|channel|>analysis<|message|>Let <me> think.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
ARGUMENTS = '<|message|>{"ok":true,"kind":"bb"}<|call|>'
CALLS = (
    " to=functions.get<|channel|>commentary json",
    " to=functions.get<|channel|>commentary <|constrain|>json",
    " to=functions.get<|channel|>commentary",
    "<|channel|>commentary to=functions.get <|constrain|>json",
    "<|channel|>commentary to=functions.get json",
    "<|channel|>commentary to=functions.get",
)
FINALS = ("<|channel|>final", "<|channel|>final json", "<|channel|>final <|constrain|>json")
VERDICT = '<|message|>{"ok": true, "kind": "a"}<|return|>'


def asking(**fields: Any) -> Conversation:
    return Conversation((ChatMessage(MessageRole.USER, "hello"),), **fields)


JSON_ANSWER = asking(response_format=JSON)
JSON_OR_CALL = asking(response_format=JSON, tools=(GET,))
ANY_CALL = asking(tools=(GET, GET_WEATHER), tool_choice=REQUIRED)
THIS_CALL = asking(tools=(GET, GET_WEATHER), tool_choice=NAMED)
PLAIN_TEXT = ToolDefinition(
    "patch", None, {"type": "string"}, strict=True, custom=True, lark='start: "+ " /[a-z]+/ "\\n"'
)
PATCH_CALL = asking(tools=(PLAIN_TEXT, GET_WEATHER))
STRICT_CALL = asking(tools=(STRICT, GET_WEATHER))
ONE_OF_TWO = asking(
    tools=(GET, GET_WEATHER), tool_choice=ToolChoice(ToolChoiceMode.AUTO, allowed=frozenset({"get_weather"}))
)
ONLY_ONE_OF_TWO = asking(
    tools=(GET, GET_WEATHER), tool_choice=ToolChoice(ToolChoiceMode.REQUIRED, allowed=frozenset({"get"}))
)
NONE_OF_TWO = asking(
    tools=(GET, GET_WEATHER), tool_choice=ToolChoice(ToolChoiceMode.AUTO, allowed=frozenset())
)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary.pieces, range(FIRST_SPECIAL, vocabulary.size), vocabulary.encode)


def grammar_of(formatter: HarmonyFormatter, conversation: Conversation) -> GrammarSpec:
    grammar = formatter.render(conversation).grammar
    assert grammar is not None
    assert grammar.problem() is None
    return grammar


def mask_of(compiler: GrammarCompiler, state: GrammarState) -> np.ndarray:
    bits = np.zeros((1, compiler.words), dtype=np.int32)
    if state.matcher is not None:
        compiler.fill([(state.matcher, 0)], bits)
    state.constrain(bits[0], compiler.text_mask, compiler.end_id)
    return bits[0]


def stops_at(compiler: GrammarCompiler, grammar: GrammarSpec, token_ids: list[int]) -> int | None:
    """Index of the first token that a decode worker would not choose; None when it may say all of them."""
    state = GrammarState(compiler.compile(grammar).result())
    for index, token in enumerate(token_ids):
        mask = mask_of(compiler, state)
        if not mask[token >> 5] >> (token & 31) & 1:
            return index
        state.advance(token)
    return None


@pytest.mark.parametrize(
    ("conversation", "text"),
    [
        *((JSON_ANSWER, before + final + VERDICT) for before in ("", THINK, THINK * 2) for final in FINALS),
        *((JSON_OR_CALL, THINK + header + text) for header, text in zip(FINALS, [VERDICT] * 3, strict=True)),
        *((JSON_OR_CALL, header + "<|message|>anything<|call|>") for header in CALLS),
        *(
            (conversation, THINK + header + ARGUMENTS)
            for conversation in (ANY_CALL, THIS_CALL)
            for header in CALLS
        ),
        (ANY_CALL, THINK + " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>"),
        *((STRICT_CALL, THINK + header + ARGUMENTS) for header in CALLS),
        (STRICT_CALL, "<|channel|>final<|message|>any {text}<|return|>"),
        (
            STRICT_CALL,
            PREAMBLE + CALLS[0] + ARGUMENTS,
        ),
        (STRICT_CALL, " to=functions.get_weather<|channel|>commentary json<|message|>free<|call|>"),
        (ONE_OF_TWO, THINK + " to=functions.get_weather<|channel|>commentary json<|message|>free<|call|>"),
        (PATCH_CALL, THINK + " to=functions.patch<|channel|>commentary json<|message|>+ abc\n<|call|>"),
        (PATCH_CALL, " to=functions.get_weather<|channel|>commentary json<|message|>free<|call|>"),
        (PATCH_CALL, THINK + "<|channel|>final<|message|>any {text}<|return|>"),
        (ONE_OF_TWO, PREAMBLE + "<|channel|>final<|message|>any {text}<|return|>"),
        *((ONLY_ONE_OF_TWO, THINK + header + ARGUMENTS) for header in CALLS),
        (NONE_OF_TWO, THINK + "<|channel|>final<|message|>any {text}<|return|>"),
    ],
)
def test_what_a_model_should_write_may_be_written(
    formatter: HarmonyFormatter, compiler: GrammarCompiler, conversation: Conversation, text: str
) -> None:
    tokens = formatter.vocabulary.encode_marked(text)
    assert stops_at(compiler, grammar_of(formatter, conversation), tokens) is None


@pytest.mark.parametrize(
    ("conversation", "fine", "wrong"),
    [
        (JSON_ANSWER, THINK + "<|channel|>", "commentary"),
        (JSON_ANSWER, "<|channel|>final<|message|>", "Sure"),
        (JSON_ANSWER, '<|channel|>final<|message|>{"ok":true', "<|return|>"),
        (JSON_ANSWER, '<|channel|>final<|message|>{"ok":true,"kind":"a"}', "<|end|>"),
        (JSON_ANSWER, "<|channel|>analysis<|message|>hm", "<|return|>"),
        (JSON_ANSWER, "<|channel|>analysis<|message|>hm", "<|channel|>"),
        (JSON_ANSWER, "", " to"),
        (JSON_OR_CALL, "<|channel|>commentary", "<|message|>"),
        (ANY_CALL, "<|channel|>", "final"),
        (ANY_CALL, "<|channel|>commentary", "<|message|>"),
        (ANY_CALL, THINK + " to=functions.get<|channel|>commentary json<|message|>", "["),
        (THIS_CALL, THINK + " to=functions.get", "_weather"),
        (STRICT_CALL, " to=functions.get<|channel|>commentary json<|message|>", "1"),
        (PATCH_CALL, " to=functions.patch<|channel|>commentary json<|message|>", "{"),
        (PATCH_CALL, " to=functions.patch<|channel|>commentary json<|message|>+ abc", "<|call|>"),
        (PATCH_CALL, " to=functions.patch<|channel|>commentary json<|message|>+ abc\n", "<|end|>"),
        (ONE_OF_TWO, THINK + " to=functions.get", "<|channel|>"),
        (ONE_OF_TWO, "<|channel|>commentary to=functions.get", " json"),
        (ONLY_ONE_OF_TWO, " to=functions.get", "_weather"),
        (ONLY_ONE_OF_TWO, "<|channel|>", "final"),
        (NONE_OF_TWO, "", " to"),
        (NONE_OF_TWO, "<|channel|>commentary", " to"),
    ],
)
def test_what_breaks_the_form_cannot_be_written(
    formatter: HarmonyFormatter, compiler: GrammarCompiler, conversation: Conversation, fine: str, wrong: str
) -> None:
    encode = formatter.vocabulary.encode_marked
    before = encode(fine)
    assert stops_at(compiler, grammar_of(formatter, conversation), before + encode(wrong)) == len(before)


def test_without_demands_there_is_no_grammar(formatter: HarmonyFormatter) -> None:
    for conversation in (
        asking(),
        asking(tools=(GET,)),
        asking(tools=(STRICT,), tool_choice=ToolChoice(ToolChoiceMode.NONE)),
    ):
        assert formatter.render(conversation).grammar is None


def wander(
    compiler: GrammarCompiler, grammar: GrammarSpec, seed: int, limit: int = 400
) -> tuple[list[int], bool]:
    """What a model says that knows nothing: any token that it may, the end of a message rather often."""
    chance = random.Random(seed)
    state = GrammarState(compiler.compile(grammar).result())
    said: list[int] = []
    while len(said) < limit:
        mask = np.unpackbits(mask_of(compiler, state).view(np.uint8), bitorder="little")
        ends = [token for token in (RETURN, CALL, END) if mask[token]]
        allowed = np.flatnonzero(mask)
        token = ends[0] if ends and chance.random() < 0.5 else int(allowed[chance.randrange(len(allowed))])
        said.append(token)
        state.advance(token)
        if token in (RETURN, CALL):
            return said, True
    return said, False


@pytest.mark.parametrize("conversation", [JSON_ANSWER, JSON_OR_CALL, ANY_CALL, THIS_CALL, STRICT_CALL])
def test_whatever_a_model_may_say_has_the_form(
    formatter: HarmonyFormatter, compiler: GrammarCompiler, conversation: Conversation
) -> None:
    prompt = formatter.render(conversation)
    grammar = grammar_of(formatter, conversation)
    kinds = set()
    for seed in range(30):
        said, whole = wander(compiler, grammar, seed)
        assert whole, formatter.vocabulary.decode(said)
        parser = formatter.parser(prompt)
        deltas = [*parser.feed(said), *(outcome := parser.finish(FinishReason.STOP)).deltas]
        content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
        names = [d.name for d in deltas if isinstance(d, ToolCallStart)]
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolCallArgumentsDelta))
        assert {kind for kind in outcome.repairs if kind != "code_point_cut"} <= {"call_without_arguments"}
        kinds.add(tuple(names))
        if conversation.tool_choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
            assert len(names) == 1
            assert content == ""
        if names == ["get"] and conversation is not JSON_OR_CALL:
            value = json.loads(arguments)
            assert set(value) == {"ok", "kind"}
        elif names == ["get_weather"] and conversation is ANY_CALL:
            assert json.loads(arguments) == {}
        elif not names and conversation.response_format is JSON:
            assert set(json.loads(content)) == {"ok", "kind"}
    if conversation is ANY_CALL:
        assert kinds == {("get",), ("get_weather",)}


def test_a_schema_that_workers_cannot_compile_says_why(
    formatter: HarmonyFormatter, compiler: GrammarCompiler
) -> None:
    bad = asking(response_format=ResponseFormat(ResponseFormatKind.JSON_SCHEMA, schema={"not": {}}))
    with pytest.raises(GrammarError, match="not"):
        compiler.compile(grammar_of(formatter, bad)).result()
