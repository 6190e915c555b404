"""One choice of a chat answer: from token ids to deltas, with stop texts, log-probabilities and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from antiphon.protocol.messages import FinishReason, TokenLogprobs
from antiphon.router.formatter import (
    ContentDelta,
    OutputParser,
    OutputRegion,
    ParserOutcome,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from antiphon.router.lifecycle import EndKind
from antiphon.router.openai.custom_calls import CustomCalls, CustomCallStart, CustomInputDelta, ShownDelta
from antiphon.router.openai.logprobs import JsonLogprob, TokenBytes, chat_logprob
from antiphon.router.openai.stop_strings import StopStrings


@dataclass(slots=True)
class AnswerDelta:
    """A delta to show, with the log-probabilities of the content tokens it completes."""

    delta: ShownDelta
    logprobs: Sequence[JsonLogprob] = ()


class ChatAnswer:
    """Feeds one choice's tokens through the format's parser and the stop texts.

    Stop texts are looked for in content only; what belongs together in content is one message, so a stop
    text never spans a tool call or reasoning.
    """

    def __init__(
        self,
        parser: OutputParser,
        stops: Sequence[str],
        token_bytes: TokenBytes,
        *,
        forced_call: bool = False,
        custom_calls: CustomCalls | None = None,
    ) -> None:
        self._parser = parser
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)
        self._token_bytes = token_bytes
        self._forced_call = forced_call
        self._custom_calls = custom_calls or CustomCalls(())
        self._pending_logprobs: list[JsonLogprob] = []
        self.token_count = 0
        self.outcome: ParserOutcome | None = None

    def has_stopped(self) -> bool:
        """A stop text appeared: nothing more is wanted."""
        return self._stops.matched is not None

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> list[AnswerDelta]:
        """Take new tokens; what they let the client see. Tokens after a stop text are not looked at."""
        if self.has_stopped():
            return []
        if logprobs is None and not self._one_by_one:
            self.token_count += len(token_ids)
            return [AnswerDelta(delta) for delta in self._custom_calls.rewrite(self._parser.feed(token_ids))]
        shown: list[AnswerDelta] = []
        for i, token_id in enumerate(token_ids):
            self.token_count += 1
            deltas = self._parser.feed((token_id,))
            if logprobs is not None and self._parser.region is OutputRegion.CONTENT:
                self._pending_logprobs.append(chat_logprob(token_id, logprobs[i], self._token_bytes))
            shown.extend(self._through_stops(self._custom_calls.rewrite(deltas)))
            if self.has_stopped():
                break
        return shown

    def finish(self, kind: EndKind) -> list[AnswerDelta]:
        """End the choice; what was still held back."""
        reason = FinishReason.LENGTH if kind is EndKind.LENGTH else FinishReason.STOP
        self.outcome = self._parser.finish(reason)
        if self.has_stopped():
            return []
        shown = list(self._through_stops(self._custom_calls.rewrite(self.outcome.deltas)))
        if not self.has_stopped():
            shown.extend(self._flush_held())
        return shown

    def finish_reason(self, kind: EndKind) -> str:
        """OpenAI's ``finish_reason``; a call that the client forced ends with ``stop``."""
        if self.has_stopped():
            return "stop"
        if kind is EndKind.LENGTH:
            return "length"
        called = self.outcome is not None and self.outcome.tool_calls > 0
        return "tool_calls" if called and not self._forced_call else "stop"

    def take_pending_logprobs(self) -> list[JsonLogprob]:
        """Log-probabilities of content tokens that completed no visible text."""
        pending, self._pending_logprobs = self._pending_logprobs, []
        return pending

    def _through_stops(self, deltas: Iterable[ShownDelta]) -> list[AnswerDelta]:
        shown: list[AnswerDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                text = self._stops.feed(delta.text)
                if text:
                    shown.append(AnswerDelta(ContentDelta(text), self.take_pending_logprobs()))
                if self.has_stopped():
                    return shown
            else:
                shown.extend(self._flush_held())
                shown.append(AnswerDelta(delta))
        return shown

    def _flush_held(self) -> list[AnswerDelta]:
        text = self._stops.flush()
        return [AnswerDelta(ContentDelta(text), self.take_pending_logprobs())] if text else []


@dataclass(slots=True)
class CollectedCall:
    """A whole tool call; ``arguments`` are its pieces, or those of a custom tool's input."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    custom: bool = False


@dataclass(slots=True)
class CollectedMessage:
    """A whole choice, for the answer that is one document; texts are kept as the pieces they came in."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    tool_calls: list[CollectedCall] = field(default_factory=list)
    logprobs: list[JsonLogprob] = field(default_factory=list)

    def add(self, shown: AnswerDelta) -> None:
        """Append one delta."""
        self.logprobs.extend(shown.logprobs)
        match shown.delta:
            case ContentDelta(text):
                self.content.append(text)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart(_, name, call_id):
                self.tool_calls.append(CollectedCall(call_id, name))
            case CustomCallStart(_, name, call_id):
                self.tool_calls.append(CollectedCall(call_id, name, custom=True))
            case ToolCallArgumentsDelta(index, text) | CustomInputDelta(index, text):
                self.tool_calls[index].arguments.append(text)
