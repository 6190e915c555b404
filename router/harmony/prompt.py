"""Conversations as Harmony messages, and those as token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ReasoningEffort,
    ResponseFormat,
    ResponseFormatKind,
    ToolDefinition,
)
from antiphon.router.formatter import InvalidPrompt
from antiphon.router.harmony.history import first_kept_reasoning, is_final
from antiphon.router.harmony.markers import CALL, CHANNEL, END, MESSAGE, START
from antiphon.router.harmony.schemas import json_text
from antiphon.router.harmony.typescript import comment_lines, function_type
from antiphon.router.harmony.vocabulary import Vocabulary

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
"""The model knows itself by this line; an operator's system prompt belongs into the developer message."""
KNOWLEDGE_CUTOFF = "2024-06"
FUNCTIONS = "functions"
"""The namespace of a request's own tools."""
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
FUNCTIONS_CHANNEL = f"Calls to these tools must go to the commentary channel: '{FUNCTIONS}'."

_PARTICIPANT = re.compile(r"[^\s<|\\/>]{1,64}")
_INSTRUCTING = (MessageRole.SYSTEM, MessageRole.DEVELOPER)


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message: ``<|start|>author:name to=recipient<|channel|>channel content_type<|message|>text``.

    ``closer`` is the marker that ends it.
    """

    author: str
    text: str
    name: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    closer: int = END

    def token_ids(self, vocabulary: Vocabulary) -> list[int]:
        """The message as token ids. Texts are plain: marker names in them are encoded letter by letter."""
        ids = [START, *vocabulary.encode(self.author)]
        if self.name is not None:
            ids += vocabulary.encode(f":{self.name}")
        if self.recipient is not None:
            ids += vocabulary.encode(f" to={self.recipient}")
        if self.channel is not None:
            ids += (CHANNEL, *vocabulary.encode(self.channel))
        if self.content_type is not None:
            ids += vocabulary.encode(f" {self.content_type}")
        ids.append(MESSAGE)
        ids += vocabulary.encode(self.text)
        ids.append(self.closer)
        return ids


def call_message(name: str, arguments: str) -> HarmonyMessage:
    """A function call in its one form: recipient in the role's place, content type ``json``."""
    return HarmonyMessage(
        "assistant",
        arguments,
        recipient=f"{FUNCTIONS}.{name}",
        channel="commentary",
        content_type="json",
        closer=CALL,
    )


def conversation_messages(conversation: Conversation, current_date: str) -> Iterator[HarmonyMessage]:
    """Every message of the prompt in order, without the ``<|start|>assistant`` that asks for the answer.

    ``current_date`` is ``YYYY-MM-DD``.

    Raises:
        InvalidPrompt: a tool result answers no call, or a participant's name cannot stand in a header.
    """
    tools = conversation.offered_tools
    messages = conversation.messages
    leading = 0
    while leading < len(messages) and messages[leading].role in _INSTRUCTING:
        leading += 1
    yield HarmonyMessage(
        "system", system_text(conversation.reasoning_effort, current_date, has_functions=bool(tools))
    )
    developer = developer_text(
        [message.text for message in messages[:leading]], tools, conversation.response_format
    )
    if developer:
        yield HarmonyMessage("developer", developer)
    reasoning_from = first_kept_reasoning(messages)
    call_names: dict[str, str] = {}
    for index, message in enumerate(messages[leading:], start=leading):
        if message.role is MessageRole.ASSISTANT:
            yield from _assistant_messages(message, keep_reasoning=index >= reasoning_from)
            call_names.update((call.id, call.name) for call in message.tool_calls)
        elif message.role is MessageRole.TOOL:
            yield _tool_message(message, index, call_names)
        elif message.role is MessageRole.USER:
            yield HarmonyMessage("user", message.text, name=_participant(message, index))
        elif message.text:
            yield HarmonyMessage("developer", developer_text([message.text], (), ResponseFormat()))


def system_text(effort: ReasoningEffort | None, current_date: str, *, has_functions: bool) -> str:
    """The system message; no effort means medium."""
    lines = [
        IDENTITY,
        f"Knowledge cutoff: {KNOWLEDGE_CUTOFF}",
        f"Current date: {current_date}",
        "",
        f"Reasoning: {(effort or ReasoningEffort.MEDIUM).value}",
        "",
        CHANNELS,
    ]
    if has_functions:
        lines.append(FUNCTIONS_CHANNEL)
    return "\n".join(lines)


def developer_text(
    instructions: Sequence[str], tools: Sequence[ToolDefinition], response_format: ResponseFormat
) -> str:
    """Instructions, functions and response format as the sections of one developer message; may be empty."""
    sections = []
    instruction = "\n\n".join(text for text in instructions if text)
    if instruction:
        sections.append(f"# Instructions\n\n{instruction}")
    if tools:
        declarations = "\n\n".join(
            function_type(tool.name, tool.description, tool.parameters) for tool in tools
        )
        sections.append(
            f"# Tools\n\n## {FUNCTIONS}\n\n"
            f"namespace {FUNCTIONS} {{\n\n{declarations}\n\n}} // namespace {FUNCTIONS}"
        )
    if response_format.kind is not ResponseFormatKind.TEXT:
        sections.append(_response_format_text(response_format))
    return "\n\n".join(sections)


def _response_format_text(response_format: ResponseFormat) -> str:
    described = response_format.kind is ResponseFormatKind.JSON_SCHEMA
    schema: JsonValue = {"type": "object"}
    if described and response_format.schema is not None:
        schema = response_format.schema
    comment = comment_lines(response_format.description or "", "") if described else ""
    name = response_format.name if described else "json_object"
    return f"# Response Formats\n\n## {name}\n\n{comment}{json_text(schema)}"


def _assistant_messages(message: ChatMessage, *, keep_reasoning: bool) -> Iterator[HarmonyMessage]:
    if message.reasoning and keep_reasoning:
        yield HarmonyMessage("assistant", message.reasoning, channel="analysis")
    if message.text or is_final(message):
        # Before a call, text is a preamble: it spoke to the user without ending the turn.
        channel = "commentary" if message.tool_calls else "final"
        yield HarmonyMessage("assistant", message.text, channel=channel)
    for call in message.tool_calls:
        yield call_message(call.name, call.arguments)


def _tool_message(message: ChatMessage, index: int, call_names: dict[str, str]) -> HarmonyMessage:
    name = call_names.get(message.tool_call_id) if message.tool_call_id is not None else message.name
    if not name:
        raise InvalidPrompt(
            f"messages[{index}]: no earlier assistant message has a tool call with id "
            f"{message.tool_call_id!r}",
            f"messages[{index}].tool_call_id",
        )
    return HarmonyMessage(f"{FUNCTIONS}.{name}", message.text, recipient="assistant", channel="commentary")


def _participant(message: ChatMessage, index: int) -> str | None:
    if message.name is not None and not _PARTICIPANT.fullmatch(message.name):
        raise InvalidPrompt(
            f"messages[{index}].name: {message.name!r} must be 1 to 64 characters "
            "without spaces and without any of < | \\ / >",
            f"messages[{index}].name",
        )
    return message.name
