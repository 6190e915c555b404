"""What a conversation demands of its answer's form, whatever the chat format is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from antiphon.protocol.grammar import FreeText, JsonSchema, LarkGrammar, RegionContent
from antiphon.router.conversation import Conversation, ResponseFormatKind, ToolChoiceMode, ToolDefinition
from antiphon.router.formatter import InvalidPrompt
from antiphon.router.schema_wording import in_known_words

_NO_PARAMETERS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}
_FORCED = (ToolChoiceMode.NAMED, ToolChoiceMode.REQUIRED)
_JsonObject = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class CallDemand:
    """A function that may be called, and the schema or the grammar that its arguments must follow, if there
    is one."""

    name: str
    schema: _JsonObject | None
    lark: str | None = None

    @property
    def arguments(self) -> RegionContent:
        """What the call's arguments may be."""
        if self.lark is not None:
            return LarkGrammar(self.lark)
        return FreeText() if self.schema is None else JsonSchema(json.dumps(self.schema))


@dataclass(frozen=True, slots=True)
class AnswerDemands:
    """What an answer must be: a call of one of ``calls`` when ``must_call``, else it may be a visible answer
    too, which must follow ``answer_schema`` if there is one."""

    must_call: bool
    answer_schema: _JsonObject | None
    calls: tuple[CallDemand, ...]

    @property
    def answer(self) -> RegionContent:
        """What the visible answer may be."""
        return FreeText() if self.answer_schema is None else JsonSchema(json.dumps(self.answer_schema))

    def schemas(self) -> Iterator[tuple[str | None, _JsonObject]]:
        """Every schema to follow: of the function of that name, or None and that of the visible answer."""
        if self.answer_schema is not None:
            yield None, self.answer_schema
        for call in self.calls:
            if call.schema is not None:
                yield call.name, call.schema


def demands_of(conversation: Conversation) -> AnswerDemands | None:
    """What the answer to a conversation must be; None when its form is free.

    Raises:
        InvalidPrompt: a call is demanded of a function that is not declared.
    """
    choice, form = conversation.tool_choice, conversation.response_format
    forced = choice.mode in _FORCED
    schema: _JsonObject | None = None
    if not forced and form.kind is not ResponseFormatKind.TEXT:
        schema = {"type": "object"} if form.schema is None else _followed(form.schema)
    tools = conversation.callable_tools
    some_are_left_out = choice.allowed is not None and len(tools) < len(conversation.offered_tools)
    if forced and not tools:
        raise InvalidPrompt("tool_choice demands a call of a function that is not declared", "tool_choice")
    bound = schema is not None or any(tool.strict for tool in tools)
    if not (forced or bound or some_are_left_out):
        return None
    return AnswerDemands(forced, schema, tuple(_call_demand(tool, forced=forced) for tool in tools))


def _call_demand(tool: ToolDefinition, *, forced: bool) -> CallDemand:
    if tool.lark is not None:
        return CallDemand(tool.name, None, tool.lark)
    return CallDemand(tool.name, _arguments(tool) if forced or tool.strict else None)


def _arguments(tool: ToolDefinition) -> _JsonObject:
    """Arguments are an object, whether or not the schema says so."""
    return _NO_PARAMETERS if tool.parameters is None else _followed({"type": "object", **tool.parameters})


def _followed(schema: _JsonObject) -> _JsonObject:
    """A schema as answers are kept to it; one that is nested too deeply stays as it is, and is refused."""
    try:
        return in_known_words(schema)
    except RecursionError:
        return schema
