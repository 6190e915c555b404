"""The simplest chat format there is: one token per byte, one marker per region.

It stands beside Harmony to keep the formatter seam honest, and serves tests and measurements of the router
that should not depend on a vocabulary. Output grammar: any number of ``<|reasoning|>text``,
``<|content|>text`` and ``<|tool|>name<|arguments|>text``, ended by ``<|stop|>``; text without a marker is
content.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from antiphon.protocol.grammar import FreeText, GrammarRegion, GrammarSpec, OneOfSequences
from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import Conversation
from antiphon.router.demands import AnswerDemands, demands_of
from antiphon.router.formatter import (
    ChatDelta,
    ContentDelta,
    OutputRegion,
    ParserOutcome,
    ReasoningDelta,
    RenderedPrompt,
    ToolCallArgumentsDelta,
    ToolCallStart,
)

REASONING, CONTENT, TOOL, ARGUMENTS, STOP = range(256, 261)
VOCABULARY_SIZE = 261
_NAMES = {REASONING: "reasoning", CONTENT: "content", TOOL: "tool", ARGUMENTS: "arguments", STOP: "stop"}


def byte_answer(*parts: tuple[int, str]) -> list[int]:
    """Token ids of an answer made of (marker, text) parts, with the stop marker at the end."""
    return [t for marker, text in parts for t in (marker, *text.encode())] + [STOP]


class ByteParser:
    """An ``OutputParser`` of the byte format."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._tool_names = tool_names
        self._marker = CONTENT
        self._last_region = OutputRegion.STRUCTURE
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tool_name = ""
        self._calls = 0
        self._reasoning_tokens = 0
        self._repairs: dict[str, int] = {}

    @property
    def region(self) -> OutputRegion:
        """The region of the last token fed."""
        return self._last_region

    def feed(self, token_ids: Sequence[int]) -> list[ChatDelta]:
        """Take the next output tokens; the deltas they complete."""
        deltas: list[ChatDelta] = []
        for token_id in token_ids:
            if token_id < 256:
                self._last_region = self._text_region()
                self._reasoning_tokens += self._last_region is OutputRegion.REASONING
                deltas.extend(self._text(self._decoder.decode(bytes((token_id,)))))
            else:
                self._last_region = OutputRegion.STRUCTURE
                deltas.extend(self._close_region())
                deltas.extend(self._open_region(token_id))
        return deltas

    def finish(self, reason: FinishReason) -> ParserOutcome:
        """End the answer."""
        deltas = tuple(self._close_region())
        return ParserOutcome(deltas, self._calls, self._reasoning_tokens, self._repairs)

    def _text_region(self) -> OutputRegion:
        match self._marker:
            case _ if self._marker == REASONING:
                return OutputRegion.REASONING
            case _ if self._marker in (TOOL, ARGUMENTS):
                return OutputRegion.TOOL_CALL
            case _:
                return OutputRegion.CONTENT

    def _open_region(self, marker: int) -> list[ChatDelta]:
        opened: list[ChatDelta] = []
        if marker == TOOL:
            self._tool_name = ""
        if marker == ARGUMENTS:
            if self._tool_name not in self._tool_names:
                self._repairs["unknown_tool"] = self._repairs.get("unknown_tool", 0) + 1
            name = self._tool_name or "unnamed"
            opened.append(ToolCallStart(self._calls, name, f"call_{self._calls}"))
            self._calls += 1
        self._marker = marker
        return opened

    def _close_region(self) -> list[ChatDelta]:
        return self._text(self._decoder.decode(b"", final=True))

    def _text(self, text: str) -> list[ChatDelta]:
        if not text:
            return []
        if self._marker == TOOL:
            self._tool_name += text
            return []
        if self._marker == REASONING:
            return [ReasoningDelta(text)]
        if self._marker == ARGUMENTS:
            return [ToolCallArgumentsDelta(self._calls - 1, text)]
        return [ContentDelta(text)]


def byte_grammar(demands: AnswerDemands) -> GrammarSpec:
    """The grammar of an answer: reasoning perhaps, then the visible answer or a call."""
    names = tuple((*call.name.encode(), ARGUMENTS) for call in demands.calls)
    openers = (*(() if demands.must_call else (CONTENT,)), *((TOOL,) if names else ()))
    first = OneOfSequences(((REASONING,), *((opener,) for opener in openers)))
    regions = [
        GrammarRegion(((STOP,),), first),
        GrammarRegion(((REASONING,),), FreeText(), openers),
    ]
    if not demands.must_call:
        regions.append(GrammarRegion(((CONTENT,),), demands.answer, (STOP,)))
    if names:
        regions.append(GrammarRegion(((TOOL,),), OneOfSequences(names)))
    for call, name in zip(demands.calls, names, strict=True):
        regions.append(GrammarRegion(((TOOL, *name),), call.arguments, (STOP,)))
    return GrammarSpec(tuple(regions), (STOP,))


class ByteFormatter:
    """A ``ChatFormatter`` of the byte format."""

    vocabulary_size = VOCABULARY_SIZE
    end_of_text_ids = (STOP,)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """``role: text`` lines; tools as JSON in front."""
        offered = conversation.offered_tools
        lines = [json.dumps({"tool": tool.name, "parameters": tool.parameters}) for tool in offered]
        for message in conversation.messages:
            lines.append(f"{message.role}: {message.text}")
        text = "\n".join([*lines, "assistant: "])
        demands = demands_of(conversation)
        return RenderedPrompt(
            list(text.encode()),
            (STOP,),
            frozenset(tool.name for tool in offered),
            grammar=None if demands is None else byte_grammar(demands),
        )

    def parser(self, prompt: RenderedPrompt) -> ByteParser:
        """A parser for one answer."""
        return ByteParser(prompt.tool_names)

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the marker's name."""
        return bytes((token_id,)) if token_id < 256 else f"<|{_NAMES[token_id]}|>".encode()

    def is_marker(self, token_id: int) -> bool:
        """Everything that is no byte."""
        return token_id >= REASONING
