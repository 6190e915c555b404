"""What the Harmony tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from antiphon.protocol.messages import FinishReason
from antiphon.router.formatter import (
    ChatDelta,
    ContentDelta,
    ParserOutcome,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.parser import HarmonyParser
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary, load_vocabulary

DATE = "2025-06-28"


@dataclass
class Answer:
    """A whole answer, and the deltas it came in; adjacent deltas of one kind are merged in ``merged``."""

    deltas: list[ChatDelta]
    outcome: ParserOutcome
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    merged: list[tuple[str, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for delta in self.deltas:
            match delta:
                case ContentDelta(text):
                    self.content += text
                    self._merge("content", -1, text)
                case ReasoningDelta(text):
                    self.reasoning += text
                    self._merge("reasoning", -1, text)
                case ToolCallStart(index, name, _):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                    self.merged.append(("start", index, name))
                case ToolCallArgumentsDelta(index, text):
                    self.calls[index][1] += text
                    self._merge("arguments", index, text)

    def _merge(self, kind: str, index: int, text: str) -> None:
        if self.merged and self.merged[-1][:2] == (kind, index):
            text = self.merged.pop()[2] + text
        self.merged.append((kind, index, text))


ParseTokens = Callable[..., Answer]


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="session")
def formatter(vocabulary: Vocabulary) -> HarmonyFormatter:
    return HarmonyFormatter(vocabulary, current_date=lambda: DATE)


@pytest.fixture(scope="session")
def parse_tokens(vocabulary: Vocabulary) -> ParseTokens:
    """Parse token ids in steps of the given lengths, the last of which repeats."""

    def parse(
        token_ids: Sequence[int],
        steps: Sequence[int] = (1_000_000,),
        tools: ToolPolicy | None = None,
        reason: FinishReason = FinishReason.STOP,
    ) -> Answer:
        parser = HarmonyParser(vocabulary.pieces, tools or ToolPolicy())
        deltas: list[ChatDelta] = []
        position = 0
        lengths = iter(steps)
        length = steps[-1]
        while position < len(token_ids):
            length = next(lengths, length)
            deltas += parser.feed(token_ids[position : position + length])
            position += length
        outcome = parser.finish(reason)
        return Answer([*deltas, *outcome.deltas], outcome)

    return parse
