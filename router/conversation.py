"""A conversation as the router understands it, whatever API it came through and whatever format it goes to.

The endpoints translate their JSON into these; a ``ChatFormatter`` turns them into token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue


class MessageRole(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ReasoningEffort(StrEnum):
    """How much the model is asked to think; the efforts that the model was trained on."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that an assistant message made; ``arguments`` is the text the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Text parts are already joined; an assistant message may hold all three kinds of output.

    The order inside an assistant message is reasoning, text, tool calls. ``tool_call_id`` is set on TOOL
    messages only and names a call of an earlier assistant message; ``name`` is what the client wrote.
    """

    role: MessageRole
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function the model may call; ``parameters`` is a JSON schema object, None without parameters.

    ``custom`` is one whose caller wants a text as its input. With ``lark`` its arguments are text that
    follows this grammar, and no JSON.
    """

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool = False
    custom: bool = False
    lark: str | None = None


class ToolChoiceMode(StrEnum):
    """Whether the model may, must not or must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name`` is set exactly when the mode is NAMED. ``allowed`` are the functions that AUTO and REQUIRED
    choose from; None is all of them."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    allowed: frozenset[str] | None = None


class ResponseFormatKind(StrEnum):
    """What the visible answer must be."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """``name``, ``description``, ``schema`` and ``strict`` matter for JSON_SCHEMA only."""

    kind: ResponseFormatKind = ResponseFormatKind.TEXT
    name: str = "response"
    description: str | None = None
    schema: dict[str, JsonValue] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that a formatter renders into a prompt."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    response_format: ResponseFormat = ResponseFormat()

    @property
    def offered_tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that the model is told about: none under ``tool_choice`` none."""
        return () if self.tool_choice.mode is ToolChoiceMode.NONE else self.tools

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        """Those of the offered tools that ``tool_choice`` lets the answer call."""
        choice = self.tool_choice
        if choice.mode is ToolChoiceMode.NAMED:
            return tuple(tool for tool in self.tools if tool.name == choice.name)
        if choice.allowed is not None:
            return tuple(tool for tool in self.offered_tools if tool.name in choice.allowed)
        return self.offered_tools
