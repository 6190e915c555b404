"""The seam between the HTTP API and a model's chat format.

A formatter renders a conversation to token ids and makes a parser per answer that turns token ids back into
reasoning, content and tool calls. Nothing behind the router knows which formatter is in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import Conversation


class InvalidPrompt(AntiphonError):
    """A conversation cannot be rendered: the client's fault, answered with 400.

    ``param`` is the path of the offending field in the request, e.g. ``messages[2].tool_call_id``; None when
    no single field is to blame.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's chain of thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer that the user sees."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. ``index`` counts the calls of this answer from 0; ``id`` is unique, never empty."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """More argument text of call ``index``, which has started."""

    index: int
    text: str


ChatDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArgumentsDelta


class OutputRegion(StrEnum):
    """What part of the answer a token belongs to."""

    STRUCTURE = "structure"
    """Markers and headers, never shown."""
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class ParserOutcome:
    """The end of an answer: what was still held back, and the totals.

    ``deltas`` hold text that was waiting (a split code point, a header cut short). ``reasoning_tokens``
    counts tokens whose region was REASONING. ``repairs`` counts deviations from the format that were
    tolerated, by kind.
    """

    deltas: tuple[ChatDelta, ...]
    tool_calls: int
    reasoning_tokens: int
    repairs: Mapping[str, int] = field(default_factory=dict)


class OutputParser(Protocol):
    """Incremental parser of one answer. Never raises for anything a model can write."""

    @property
    def region(self) -> OutputRegion:
        """The region of the last token fed; STRUCTURE before the first."""
        ...

    def feed(self, token_ids: Sequence[int]) -> list[ChatDelta]:
        """Take the next output tokens, stop token included; the deltas they complete, in order.

        The concatenation of all deltas does not depend on how the tokens were grouped. Texts are never empty
        and never hold part of a code point.
        """
        ...

    def finish(self, reason: FinishReason) -> ParserOutcome:
        """End the answer; called exactly once, after the last ``feed``. LENGTH means it was cut short."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for an engine.

    ``stop_token_ids`` end the answer. ``tool_names`` are the functions that the model was told about.
    ``tool_calls_allowed`` is False under tool_choice none: a call is then reasoning, never surfaced; so is
    one of a function outside ``callable_tools`` (None allows all), and one beyond ``max_tool_calls`` (1 when
    calls may not be parallel, None without a limit).
    ``grammar`` is the form that the answer must have, where the conversation demands one.
    """

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    tool_names: frozenset[str] = frozenset()
    tool_calls_allowed: bool = True
    callable_tools: frozenset[str] | None = None
    max_tool_calls: int | None = None
    grammar: GrammarSpec | None = None


class ChatFormatter(Protocol):
    """One chat format and its vocabulary. Loaded once per process; safe to call from several threads."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are in ``range(vocabulary_size)``."""
        ...

    @property
    def end_of_text_ids(self) -> tuple[int, ...]:
        """Ids that end a plain text completion."""
        ...

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """Token ids up to where the assistant goes on.

        Raises:
            InvalidPrompt: the conversation breaks a rule of the format; names the field.
        """
        ...

    def parser(self, prompt: RenderedPrompt) -> OutputParser:
        """A new parser for one answer to ``prompt``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; marker text such as ``<|end|>`` stays text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, for any id below ``vocabulary_size``.

        A marker gives its name as text; an id that the vocabulary does not use gives no bytes.
        """
        ...

    def is_marker(self, token_id: int) -> bool:
        """Whether the token is a marker of the format and not text."""
        ...
