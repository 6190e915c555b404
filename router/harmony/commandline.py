"""``antiphon harmony``: the router's own rendering and parsing, for whoever debugs a transcript.

Plain functions from text to text; the command itself is wired in ``cluster``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from pydantic import JsonValue

from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import Conversation
from antiphon.router.formatter import (
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from antiphon.router.harmony.formatter import HarmonyFormatter, today
from antiphon.router.harmony.parser import HarmonyParser
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.responses_input import ResponsesPrompt, check_call_ids, responses_conversation
from antiphon.router.harmony.vocabulary import load_vocabulary
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.chat_translate import to_conversation
from antiphon.router.openai.custom_tools import CUSTOM
from antiphon.router.openai.request_fields import parse_body
from antiphon.router.openai.tool_choice import ALLOWED_TOOLS

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class TranscriptError(AntiphonError):
    """What was given to the command cannot be used; one line that says why."""


class CallJson(TypedDict):
    """A tool call as chat completions have it."""

    id: str
    type: str
    function: dict[str, str]


class MessageJson(TypedDict):
    """An assistant message as chat completions have it."""

    role: str
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    refusal: None
    tool_calls: NotRequired[list[CallJson]]


class ParsedJson(TypedDict):
    """What ``parse_output`` found."""

    message: MessageJson
    finish_reason: str
    reasoning_tokens: int
    repairs: dict[str, int]


def render_request(request_json: str | bytes, *, ids: bool = False, current_date: str | None = None) -> str:
    """The prompt of a chat or Responses request, as text with markers or, with ``ids``, as a JSON list.

    A request with ``input`` is one of the Responses API. ``model`` may be left out. ``current_date`` is
    ``YYYY-MM-DD``; today when absent.

    Raises:
        TranscriptError: not a JSON object, or no date.
        ApiError, InvalidPrompt: the request is not valid; names the field.
    """
    date = current_date or today()
    if not _DATE.fullmatch(date):
        raise TranscriptError(f"the date {date!r} is not of the form YYYY-MM-DD")
    formatter = HarmonyFormatter(current_date=lambda: date)
    prompt = formatter.render(conversation_of(request_json))
    return json.dumps(prompt.token_ids) if ids else formatter.vocabulary.decode(prompt.token_ids)


def conversation_of(request_json: str | bytes) -> Conversation:
    """The conversation of a chat or Responses request.

    Raises:
        TranscriptError, ApiError: as ``render_request``.
    """
    request = _json(request_json, "the request")
    if not isinstance(request, dict):
        raise TranscriptError("the request is not a JSON object")
    if "input" in request:
        prompt = parse_body(ResponsesPrompt, json.dumps(request).encode())
        conversation, _ = responses_conversation(prompt)
        check_call_ids(prompt, history_items=0)
        return conversation
    request.setdefault("model", "gpt-oss")
    chat = parse_body(ChatCompletionRequest, json.dumps(request).encode())
    return to_conversation(chat)[0]


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How a transcript is parsed.

    ``tools`` is None when the declared functions are not known. ``step_tokens`` feeds the parser that many
    tokens at a time; None, all at once. ``cut_short`` says that the output ended at its length limit.
    """

    tools: ToolPolicy = field(default_factory=ToolPolicy)
    step_tokens: int | None = None
    cut_short: bool = False


def parse_output(raw: str, options: ParseOptions) -> ParsedJson:
    """The chat message of raw model output: everything after ``<|start|>assistant``, with its markers.

    A final newline, as editors and ``echo`` add it, is not part of the output. Never fails on any text.
    """
    vocabulary = load_vocabulary()
    text = raw.removesuffix("\n")
    token_ids = vocabulary.encode_marked(text)
    parser = HarmonyParser(vocabulary.pieces, options.tools)
    step = options.step_tokens or max(len(token_ids), 1)
    deltas: list[ChatDelta] = []
    for start in range(0, len(token_ids), step):
        deltas += parser.feed(token_ids[start : start + step])
    outcome = parser.finish(FinishReason.LENGTH if options.cut_short else FinishReason.STOP)
    deltas += outcome.deltas
    finish_reason = "length" if options.cut_short else "tool_calls" if outcome.tool_calls else "stop"
    return ParsedJson(
        message=message_of(deltas),
        finish_reason=finish_reason,
        reasoning_tokens=outcome.reasoning_tokens,
        repairs=dict(outcome.repairs),
    )


def message_of(deltas: Iterable[ChatDelta]) -> MessageJson:
    """The whole message that deltas add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallJson] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(_, name, call_id):
                calls.append(CallJson(id=call_id, type="function", function={"name": name, "arguments": ""}))
            case ToolCallArgumentsDelta(index, text):
                calls[index]["function"]["arguments"] += text
    thought = "".join(reasoning) or None
    message = MessageJson(
        role="assistant",
        content="".join(content) or None,
        reasoning=thought,
        reasoning_content=thought,
        refusal=None,
    )
    if calls:
        message["tool_calls"] = calls
    return message


def tool_policy_of(tools_json: str | bytes) -> ToolPolicy:
    """What a file of tools declares: a list as requests have it, a list of names, or a whole request.

    Raises:
        TranscriptError: not JSON, or something in it has no name.
    """
    given = _json(tools_json, "the tools")
    request = given if isinstance(given, dict) else {}
    tools = request.get("tools", []) if isinstance(given, dict) else given
    if not isinstance(tools, list):
        raise TranscriptError("the tools are not a JSON list")
    names = frozenset(name for tool in tools if (name := _tool_name(tool)) is not None)
    return ToolPolicy(
        names=names or None,
        surface=request.get("tool_choice") != "none",
        allowed=_allowed_names(request.get("tool_choice")),
        max_calls=1 if request.get("parallel_tool_calls") is False else None,
    )


def _allowed_names(choice: JsonValue) -> frozenset[str] | None:
    """The functions that a request's ``tool_choice`` leaves to be called; None when it names none."""
    if not isinstance(choice, dict):
        return None
    if choice.get("type") != ALLOWED_TOOLS:
        name = _tool_name(choice)
        return None if name is None else frozenset((name,))
    group = choice.get(ALLOWED_TOOLS, choice)
    tools = group.get("tools") if isinstance(group, dict) else None
    if not isinstance(tools, list):
        raise TranscriptError("the allowed tools are not a JSON list")
    return frozenset(name for tool in tools if (name := _tool_name(tool)) is not None)


def _tool_name(tool: JsonValue) -> str | None:
    """The name of a function or a custom tool; None for a tool of another kind."""
    if isinstance(tool, str):
        return tool
    if not isinstance(tool, dict):
        raise TranscriptError(f"a tool is a {type(tool).__name__}, not an object or a name")
    kind = tool.get("type", "function")
    if kind not in ("function", CUSTOM):
        return None
    function = tool.get(str(kind), tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise TranscriptError("a tool has no name")
    return name


def _json(text: str | bytes, what: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError as error:
        raise TranscriptError(f"{what} is not JSON: {error}") from error
    return value
