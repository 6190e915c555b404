"""From a Responses request, or its stored items, to a conversation.

One permissive model reads every kind of item: clients send back what they got, with ids, states and nulls,
and leave out ``type`` where only one kind can be meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ResponseFormat,
    ResponseFormatKind,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from antiphon.router.openai.chat_schema import ContentPart, FunctionParam
from antiphon.router.openai.chat_translate import (
    check_call_name,
    check_schemas,
    content_text,
    distinct_tools,
    function_tool,
    reasoning_effort,
)
from antiphon.router.openai.custom_tools import CUSTOM, CustomFormat, arguments_of, custom_tool
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.request_fields import ApiModel, NestedModel
from antiphon.router.openai.tool_choice import ALLOWED_TOOLS, allowed_choice, choice_of_mode, named_choice

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
_SEPARATOR = "\n"
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class ResponsesItem(NestedModel):
    """An item of ``input``: a message, reasoning, a call of a function or a custom tool, or its output."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesCustomFormat(NestedModel):
    """What the input of a custom tool must look like: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: str | None = None


class ResponsesTool(NestedModel):
    """A tool; kinds other than ``function`` and ``custom`` are left out of the prompt."""

    type: str
    name: Annotated[str, Field(pattern=FUNCTION_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    format: ResponsesCustomFormat | None = None
    """Of a custom tool."""


class ResponsesAllowedTool(NestedModel):
    """One of the tools that may be called."""

    type: str
    name: str | None = None


class ResponsesToolChoice(NestedModel):
    """Forces one tool (``function`` or ``custom``), or leaves some to choose from (``allowed_tools``)."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ResponsesAllowedTool] | None = None


class ResponsesReasoning(NestedModel):
    """How much to think."""

    effort: str | None = None


class ResponsesFormat(NestedModel):
    """Form of the visible answer."""

    type: ResponseFormatKind
    name: str = "response"
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponsesText(NestedModel):
    """Settings of the visible answer."""

    format: ResponsesFormat | None = None


class ResponsesPrompt(ApiModel):
    """The fields of a Responses request that its prompt is made of; the others are not looked at."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[ResponsesItem]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: ResponsesText | None = None


def responses_conversation(request: ResponsesPrompt) -> tuple[Conversation, list[str]]:
    """The conversation, and the kinds of tools that were left out of it.

    Raises:
        ApiError: 400 that names the field.
    """
    tools, dropped = _tools(request.tools or ())
    effort = request.reasoning.effort if request.reasoning is not None else None
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage(MessageRole.SYSTEM, request.instructions))
    if isinstance(request.input, str):
        messages.append(ChatMessage(MessageRole.USER, request.input))
    else:
        messages += messages_of_items(request.input, tools)
    conversation = Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=reasoning_effort(effort, "reasoning.effort"),
        response_format=_response_format(request.text),
    )
    check_schemas(
        conversation,
        "text.format.schema",
        {
            tool.name: f"tools[{i}].{'format.definition' if tool.type == CUSTOM else 'parameters'}"
            for i, tool in enumerate(request.tools or ())
            if tool.name is not None and tool.type in ("function", CUSTOM)
        },
    )
    return conversation, dropped


def check_call_ids(request: ResponsesPrompt, *, history_items: int) -> None:
    """See that every output of a function belongs to a call before it.

    Args:
        history_items: those in front of the request's own, which do not count in an item's path.

    Raises:
        ApiError: 400 that names the item.
    """
    if isinstance(request.input, str):
        return
    called: set[str | None] = set()
    for number, item in enumerate(request.input, -history_items):
        if item.type in _CALLS:
            called.add(item.call_id)
        elif item.type in _OUTPUTS and item.call_id not in called:
            path = f"input[{number}].call_id"
            raise invalid(f"No call with call_id '{(item.call_id or '')[:80]}' is before '{path}'.", path)


def messages_of_items(
    items: Iterable[ResponsesItem], tools: Sequence[ToolDefinition] = ()
) -> list[ChatMessage]:
    """Conversation messages of input items; what the assistant did in a row is one message.

    Raises:
        ApiError: 400 that names the item.
    """
    messages: list[ChatMessage] = []
    turn = _AssistantTurn()
    for number, item in enumerate(items):
        path = f"input[{number}]"
        kind = item.type or ("message" if item.role is not None else None)
        if kind == "message" and item.role == MessageRole.ASSISTANT:
            turn.texts.append(content_text(item.content, f"{path}.content"))
        elif kind == "reasoning":
            turn.reasoning.append(_reasoning_text(item))
        elif kind in _CALLS:
            turn.calls.append(_call(item, path, tools))
        else:
            messages += turn.messages()
            turn = _AssistantTurn()
            messages.append(_other_message(item, kind, path))
    return messages + turn.messages()


@dataclass(slots=True)
class _AssistantTurn:
    """An assistant's items until somebody else speaks."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[ChatMessage]:
        """The one message of what was collected; none when nothing was."""
        reasoning = _SEPARATOR.join(filter(None, self.reasoning))
        if not (self.texts or self.calls or reasoning):
            return []
        text = _SEPARATOR.join(filter(None, self.texts))
        return [ChatMessage(MessageRole.ASSISTANT, text, reasoning, tuple(self.calls))]


def _call(item: ResponsesItem, path: str, tools: Sequence[ToolDefinition]) -> ToolCall:
    is_custom = item.type == "custom_tool_call"
    text = ("input", item.input) if is_custom else ("arguments", item.arguments)
    for name, value in (("call_id", item.call_id), ("name", item.name), text):
        if value is None:
            raise invalid(f"'{path}.{name}' is missing.", f"{path}.{name}", "missing_required_parameter")
    name = item.name or ""
    check_call_name(name, f"{path}.name")
    arguments = arguments_of(item.input or "", name, tools) if is_custom else item.arguments or ""
    return ToolCall(item.call_id or "", name, arguments)


def _reasoning_text(item: ResponsesItem) -> str:
    """The chain of thought if the item has it, else its summary; encrypted reasoning has no text here."""
    if isinstance(item.content, str) and item.content:
        return item.content
    parts: Sequence[ContentPart] = item.content if isinstance(item.content, list) else ()
    return _SEPARATOR.join(part.text for part in [*(parts or item.summary or ())] if part.text)


def _other_message(item: ResponsesItem, kind: str | None, path: str) -> ChatMessage:
    if kind in _OUTPUTS:
        if item.call_id is None or item.output is None:
            missing = f"{path}.{'call_id' if item.call_id is None else 'output'}"
            raise invalid(f"'{missing}' is missing.", missing, "missing_required_parameter")
        text = content_text(item.output, f"{path}.output")
        return ChatMessage(MessageRole.TOOL, text, tool_call_id=item.call_id)
    if kind is None:
        raise invalid(f"'{path}.type' is missing.", f"{path}.type", "missing_required_parameter")
    if kind != "message":
        raise unsupported(f"{path}.type", f"an item of type '{kind[:64]}' cannot be used.")
    if item.role not in (MessageRole.USER, MessageRole.SYSTEM, MessageRole.DEVELOPER):
        raise invalid(f"'{path}.role' must be user, system, developer or assistant.", f"{path}.role")
    if item.content is None:
        raise invalid(f"'{path}.content' is missing.", f"{path}.content", "missing_required_parameter")
    return ChatMessage(MessageRole(item.role), content_text(item.content, f"{path}.content"))


def _tools(given: Iterable[ResponsesTool]) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    tools: list[tuple[str, ToolDefinition]] = []
    dropped: list[str] = []
    for number, tool in enumerate(given):
        path = f"tools[{number}]"
        if tool.type not in ("function", CUSTOM):
            dropped.append(tool.type)
        elif tool.name is None:
            raise invalid(f"'{path}.name' is missing.", f"{path}.name", "missing_required_parameter")
        elif tool.type == CUSTOM:
            definition = custom_tool(tool.name, tool.description or None, _format(tool, f"{path}.format"))
            tools.append((f"{path}.name", definition))
        else:
            function = FunctionParam(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            tools.append((f"{path}.name", function_tool(function)))
    return distinct_tools(tools), dropped


def _format(tool: ResponsesTool, path: str) -> CustomFormat:
    given = tool.format
    if given is None or given.type != "grammar":
        return CustomFormat(path)
    return CustomFormat(path, given.syntax, given.definition)


def _tool_choice(choice: str | ResponsesToolChoice | None, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    if isinstance(choice, ResponsesToolChoice):
        if choice.type == ALLOWED_TOOLS:
            if choice.tools is None:
                path = "tool_choice.tools"
                raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
            return allowed_choice(choice.mode, ((t.type, t.name) for t in choice.tools), tools, "tool_choice")
        if choice.type not in ("function", CUSTOM):
            raise unsupported("tool_choice", f"a choice of type '{choice.type[:64]}' is not available.")
        if choice.name is None:
            path = "tool_choice.name"
            raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
        return named_choice(choice.name, tools)
    if choice not in (None, "auto", "none", "required"):
        raise invalid("'tool_choice' must be auto, none, required or a function.", "tool_choice")
    return choice_of_mode(choice, tools)


def _response_format(text: ResponsesText | None) -> ResponseFormat:
    given = text.format if text is not None else None
    if given is None:
        return ResponseFormat()
    if given.type is ResponseFormatKind.JSON_SCHEMA and given.schema_ is None:
        # Clients of the other API put it one level deeper, where nobody would look for it.
        path = "text.format.schema"
        raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
    return ResponseFormat(given.type, given.name, given.description, given.schema_, bool(given.strict))
