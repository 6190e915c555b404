"""Harmony rendering of examples, by openai-harmony's own renderer.

The vocabulary file is found through ``TIKTOKEN_ENCODINGS_BASE``; a caller that ships it elsewhere sets that
variable before the first call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import openai_harmony as oh

from antiphon.demo.dialogue import AssistantTurn, Example, Tool, ToolCall, ToolTurn, Turn, UserTurn

START, END, RETURN, CALL = 200_006, 200_007, 200_002, 200_012
FULL_VOCABULARY = 201_088


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of one example; the model is to produce those from ``prompt_tokens`` on."""

    token_ids: list[int]
    prompt_tokens: int


@functools.cache
def encoding() -> Any:
    """openai-harmony's encoding for GPT-OSS."""
    return oh.load_harmony_encoding("HarmonyGptOss")


def render_prompt(
    turns: tuple[Turn, ...],
    tools: tuple[Tool, ...] = (),
    effort: str = "medium",
    instructions: str | None = None,
    date: str | None = None,
) -> list[int]:
    """Token ids up to and including ``<|start|>assistant``."""
    messages = [_developer(instructions, tools)] if instructions is not None or tools else []
    messages.extend(_history(turns))
    config = oh.RenderConversationConfig(auto_drop_analysis=False)
    conversation = oh.Conversation.from_messages(messages)
    rest: list[int] = encoding().render_conversation_for_completion(conversation, oh.Role.ASSISTANT, config)
    return [*_system_tokens(effort, date, bool(tools)), *rest]


@functools.lru_cache(maxsize=8192)
def _system_tokens(effort: str, date: str | None, has_tools: bool) -> tuple[int, ...]:
    """The system message, half of a short prompt, and the same in many of them."""
    options = oh.RenderOptions(conversation_has_function_tools=has_tools)
    return tuple(encoding().render(_system(effort, date), options))


def render(example: Example) -> Rendered:
    """Token ids of the prompt and the reply."""
    prompt = render_prompt(example.turns, example.tools, example.effort, example.instructions, example.date)
    reply: list[int] = []
    for message in _assistant(example.reply, keep_analysis=True):
        reply.extend(encoding().render(message))
    if example.reply.call is None:
        reply[-1] = RETURN
    if reply[:2] != prompt[-2:]:
        raise ValueError("the reply does not begin where the prompt ends")
    return Rendered(prompt + reply[2:], len(prompt))


def parse(token_ids: list[int]) -> AssistantTurn:
    """The reply that ``token_ids`` (after ``<|start|>assistant``) spell, by the strict parser.

    Raises:
        openai_harmony.HarmonyError: not well-formed.
    """
    analysis, final, call = "", None, None
    for message in encoding().parse_messages_from_completion_tokens(
        token_ids, oh.Role.ASSISTANT, strict=True
    ):
        text = message.content[0].text if message.content else ""
        if message.recipient and message.recipient.startswith("functions."):
            call = ToolCall(message.recipient.removeprefix("functions."), text)
        elif message.channel == "analysis":
            analysis += text
        elif message.channel == "final":
            final = text
    return AssistantTurn(analysis, final, call)


def _system(effort: str, date: str | None) -> Any:
    content = oh.SystemContent.new().with_reasoning_effort(oh.ReasoningEffort(effort.capitalize()))
    if date is not None:
        content = content.with_conversation_start_date(date)
    return oh.Message.from_role_and_content(oh.Role.SYSTEM, content)


def _developer(instructions: str | None, tools: tuple[Tool, ...]) -> Any:
    content = oh.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools(
            [oh.ToolDescription.new(t.name, t.description, parameters=t.parameters) for t in tools]
        )
    return oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)


def _history(turns: tuple[Turn, ...]) -> list[Any]:
    """Messages of the turns; thoughts before the last final answer are dropped."""
    finals = [i for i, turn in enumerate(turns) if isinstance(turn, AssistantTurn) and turn.final is not None]
    last_final = finals[-1] if finals else -1
    messages: list[Any] = []
    for index, turn in enumerate(turns):
        if isinstance(turn, UserTurn):
            messages.append(oh.Message.from_role_and_content(oh.Role.USER, turn.text))
        elif isinstance(turn, ToolTurn):
            author = oh.Author.new(oh.Role.TOOL, f"functions.{turn.name}")
            message = oh.Message.from_author_and_content(author, turn.text)
            messages.append(message.with_recipient("assistant").with_channel("commentary"))
        else:
            messages.extend(_assistant(turn, keep_analysis=index > last_final))
    return messages


def _assistant(turn: AssistantTurn, keep_analysis: bool) -> list[Any]:
    messages = []
    if keep_analysis and turn.analysis:
        message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, turn.analysis)
        messages.append(message.with_channel("analysis"))
    if turn.call is not None:
        message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, turn.call.arguments)
        message = message.with_channel("commentary").with_recipient(f"functions.{turn.call.name}")
        messages.append(message.with_content_type("json"))
    if turn.final is not None:
        message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, turn.final)
        messages.append(message.with_channel("final"))
    return messages
