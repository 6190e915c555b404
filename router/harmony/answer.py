"""The deltas of one answer: joined texts, numbered calls, and text that waits for its place."""

from __future__ import annotations

import secrets
from collections import Counter
from enum import Enum

from antiphon.router.formatter import (
    ChatDelta,
    ContentDelta,
    OutputRegion,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from antiphon.router.harmony.repairs import Repair

_SEPARATOR = "\n"
"""Between two messages that end up in the same text."""


class Sink(Enum):
    """Where the text of the message that is being written goes."""

    NOWHERE = OutputRegion.STRUCTURE
    REASONING = OutputRegion.REASONING
    CONTENT = OutputRegion.CONTENT
    CALL = OutputRegion.TOOL_CALL


class AnswerWriter:
    """Collects deltas between two calls of ``take``; texts of one kind in a row are one delta."""

    def __init__(self, repairs: Counter[Repair]) -> None:
        self.calls = 0
        self.sink = Sink.NOWHERE
        self._repairs = repairs
        self._deltas: list[ChatDelta] = []
        self._texts: list[str] = []
        self._started: set[Sink] = set()
        self._latest = Sink.NOWHERE
        self._separator_due = False
        self._call_is_empty = False
        self._undecided: list[str] = []

    def open(self, sink: Sink) -> None:
        """A message of reasoning or content begins."""
        self._flush()
        if sink is Sink.CONTENT:
            self._settle(Sink.CONTENT)
        self.sink = sink
        self._separator_due = sink in self._started

    def open_final(self) -> None:
        """A final message begins: headless text before it was thinking aloud."""
        self._flush()
        self._settle(Sink.REASONING)
        self.open(Sink.CONTENT)

    def open_call(self, name: str) -> None:
        """A tool call begins."""
        self._flush()
        self._settle(Sink.CONTENT)
        self.sink = Sink.CALL
        self._separator_due = False
        self._call_is_empty = True
        self._deltas.append(ToolCallStart(self.calls, name, f"call_{secrets.token_hex(12)}"))
        self.calls += 1

    def write(self, text: str) -> None:
        """More text of the open message."""
        if not text:
            return
        if self._separator_due:
            self._texts.append(_SEPARATOR)
            self._separator_due = False
        if self.sink is not self._latest:  # an enumeration's hash is a call, and this is every token's way
            self._started.add(self.sink)
            self._latest = self.sink
        self._call_is_empty = False
        self._texts.append(text)

    def close(self, *, complete: bool) -> None:
        """The open message ends; a ``complete`` call without arguments gets an empty object."""
        if self.sink is Sink.CALL and self._call_is_empty and complete:
            self._repairs[Repair.CALL_WITHOUT_ARGUMENTS] += 1
            self.write("{}")
        self._flush()
        self.sink = Sink.NOWHERE

    def hold(self, text: str) -> None:
        """A whole message without a header: reasoning if a final answer follows, else content."""
        if text:
            self._undecided.append(text)

    def settle(self) -> None:
        """The answer ends: what is undecided is content."""
        self._settle(Sink.CONTENT)

    def take(self) -> list[ChatDelta]:
        """The deltas since the last call."""
        self._flush()
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _settle(self, sink: Sink) -> None:
        texts, self._undecided = self._undecided, []
        for text in texts:
            self.sink = sink
            self._separator_due = sink in self._started
            self.write(text)
            self._flush()
        if texts:
            self.sink = Sink.NOWHERE

    def _flush(self) -> None:
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts.clear()
        if self.sink is Sink.CONTENT:
            self._deltas.append(ContentDelta(text))
        elif self.sink is Sink.REASONING:
            self._deltas.append(ReasoningDelta(text))
        elif self.sink is Sink.CALL:
            self._deltas.append(ToolCallArgumentsDelta(self.calls - 1, text))
        else:
            raise RuntimeError("text was written outside a message")
