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

ENCODINGS_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
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
    tokens = list(system_tokens(effort, date, bool(tools)))
    if instructions is not None or tools:
        tokens += encoding().render(_developer(instructions, tools))
    finals = [i for i, turn in enumerate(turns) if isinstance(turn, AssistantTurn) and turn.final is not None]
    last_final = finals[-1] if finals else -1
    for index, turn in enumerate(turns):
        tokens += _turn_tokens(turn, keep_analysis=index > last_final)  # older thoughts are dropped
    return tokens + list(_marks("<|start|>assistant"))


@functools.lru_cache(maxsize=8192)
def system_tokens(effort: str, date: str | None, has_tools: bool) -> tuple[int, ...]:
    """The system message, half of a short prompt, and the same in many of them."""
    options = oh.RenderOptions(conversation_has_function_tools=has_tools)
    return tuple(encoding().render(_system(effort, date), options))


def render(example: Example) -> Rendered:
    """Token ids of the prompt and the reply."""
    prompt = render_prompt(example.turns, example.tools, example.effort, example.instructions, example.date)
    reply = _turn_tokens(example.reply, keep_analysis=True)
    if example.reply.call is None:
        reply[-1] = RETURN
    return Rendered(prompt + reply[2:], len(prompt))


def _turn_tokens(turn: Turn, keep_analysis: bool) -> list[int]:
    """The messages of a turn; as the library renders them, which takes several times as long."""
    if isinstance(turn, UserTurn):
        return _message("user", turn.text)
    if isinstance(turn, ToolTurn):
        return _message(f"functions.{turn.name} to=assistant<|channel|>commentary", turn.text)
    tokens: list[int] = []
    if keep_analysis and turn.analysis:
        tokens += _message("assistant<|channel|>analysis", turn.analysis)
    if turn.call is not None:
        header = f"assistant to=functions.{turn.call.name}<|channel|>commentary json"
        tokens += _message(header, turn.call.arguments, "<|call|>")
    if turn.final is not None:
        tokens += _message("assistant<|channel|>final", turn.final)
    return tokens


def _message(header: str, text: str, end: str = "<|end|>") -> list[int]:
    """One message; what looks like a special token in ``text`` stays ordinary text."""
    body: list[int] = encoding().encode(text, disallowed_special=())
    return [*_marks(f"<|start|>{header}<|message|>"), *body, *_marks(end)]


@functools.lru_cache(maxsize=4096)
def _marks(text: str) -> tuple[int, ...]:
    return tuple(encoding().encode(text, allowed_special="all"))


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
