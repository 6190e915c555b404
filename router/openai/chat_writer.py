"""Writes the answer to a chat completion request, as a stream of chunks or as one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.router.dispatch.generation import GenerationEnded, TokensArrived
from antiphon.router.formatter import ReasoningDelta
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.chat_answer import AnswerDelta, ChatAnswer, CollectedMessage
from antiphon.router.openai.chat_chunks import ChatChunks, chat_document
from antiphon.router.openai.errors import ApiError
from antiphon.router.openai.sse import DONE, sse_data
from antiphon.router.openai.usage import TokenCounts, Usage


@dataclass(frozen=True, slots=True)
class ChatIdentity:
    """What is equal in every chunk of one completion. ``created`` is in Unix seconds."""

    completion_id: str
    created: int
    model: str
    fingerprint: str


class ChatChoices:
    """The choices of one request and what they add up to; the part that both writers share."""

    def __init__(
        self,
        answers: Sequence[ChatAnswer],
        prompt_tokens: int,
        metrics: RouterMetrics,
        *,
        include_reasoning: bool,
    ) -> None:
        self._answers = answers
        self._metrics = metrics
        self._include_reasoning = include_reasoning
        self.counts = TokenCounts(prompt_tokens)

    def tokens(self, event: TokensArrived) -> list[AnswerDelta]:
        """What new tokens let the client see."""
        return self._visible(self._answers[event.choice].feed(event.token_ids, event.logprobs))

    def running_usage(self) -> Usage:
        """Tokens so far."""
        completion = sum(answer.token_count for answer in self._answers)
        return TokenCounts(self.counts.prompt, completion=completion).running_usage()

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return not self._answers[choice].has_stopped()

    def ended(self, event: GenerationEnded) -> tuple[list[AnswerDelta], str]:
        """The last deltas of a choice, and its finish reason."""
        answer = self._answers[event.choice]
        shown = self._visible(answer.finish(event.kind))
        self.counts.completion += answer.token_count
        if answer.outcome is not None:
            self.counts.reasoning += answer.outcome.reasoning_tokens
            for kind, count in answer.outcome.repairs.items():
                self._metrics.output_repairs.labels(kind).inc(count)
        return shown, answer.finish_reason(event.kind)

    def close(self, cached_tokens: Sequence[int]) -> None:
        """All choices have ended; they share one prompt, and the first of them tells how much was cached."""
        self.counts.cached = cached_tokens[0]

    def _visible(self, shown: list[AnswerDelta]) -> list[AnswerDelta]:
        if self._include_reasoning:
            return shown
        return [item for item in shown if not isinstance(item.delta, ReasoningDelta)]


class ChatStream:
    """An ``AnswerWriter``: one chunk per delta."""

    streams = True

    def __init__(
        self,
        identity: ChatIdentity,
        choices: ChatChoices,
        answers: Sequence[ChatAnswer],
        *,
        include_usage: bool,
        running_usage: bool,
    ) -> None:
        self._choices = choices
        self._answers = answers
        self._include_usage = include_usage
        self._chunks = ChatChunks(
            identity.completion_id,
            identity.created,
            identity.model,
            identity.fingerprint,
            include_usage=include_usage,
            running_usage=choices.running_usage if running_usage else None,
        )

    def open(self) -> bytes:
        """A role chunk per choice."""
        return b"".join(self._chunks.role(choice) for choice in range(len(self._answers)))

    def tokens(self, event: TokensArrived) -> bytes:
        """A chunk per delta."""
        shown = self._choices.tokens(event)
        if len(shown) == 1:
            return self._chunks.delta(event.choice, shown[0])
        return b"".join([self._chunks.delta(event.choice, one) for one in shown])

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return self._choices.wants_more(choice)

    def ended(self, event: GenerationEnded) -> bytes:
        """What was held back, then the finish chunk."""
        shown, reason = self._choices.ended(event)
        pending = self._answers[event.choice].take_pending_logprobs() if self.wants_more(event.choice) else []
        frames = [self._chunks.delta(event.choice, item) for item in shown]
        frames.append(self._chunks.finish(event.choice, reason, pending))
        return b"".join(frames)

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """The usage chunk where asked for, and the end mark."""
        self._choices.close(cached_tokens)
        usage = self._chunks.usage(self._choices.counts.chat_usage()) if self._include_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event; no end mark, since the answer is not whole."""
        return sse_data(error.body())


class ChatDocument:
    """An ``AnswerWriter``: everything at the end."""

    streams = False

    def __init__(
        self,
        identity: ChatIdentity,
        choices: ChatChoices,
        answers: Sequence[ChatAnswer],
        *,
        with_logprobs: bool,
        include_reasoning: bool,
    ) -> None:
        self._identity = identity
        self._choices = choices
        self._answers = answers
        self._with_logprobs = with_logprobs
        self._include_reasoning = include_reasoning
        self._messages = [CollectedMessage() for _ in answers]
        self._reasons = [""] * len(answers)

    def open(self) -> bytes:
        """Nothing."""
        return b""

    def tokens(self, event: TokensArrived) -> bytes:
        """Keep the deltas."""
        message = self._messages[event.choice]
        for shown in self._choices.tokens(event):
            message.add(shown)
        return b""

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return self._choices.wants_more(choice)

    def ended(self, event: GenerationEnded) -> bytes:
        """Keep what was held back, and the reason."""
        shown, self._reasons[event.choice] = self._choices.ended(event)
        for item in shown:
            self._messages[event.choice].add(item)
        if self.wants_more(event.choice):
            pending = self._answers[event.choice].take_pending_logprobs()
            self._messages[event.choice].logprobs.extend(pending)
        return b""

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """The document."""
        self._choices.close(cached_tokens)
        return chat_document(
            self._identity.completion_id,
            self._identity.created,
            self._identity.model,
            self._identity.fingerprint,
            list(zip(self._messages, self._reasons, strict=True)),
            self._choices.counts.chat_usage(),
            with_logprobs=self._with_logprobs,
            include_reasoning=self._include_reasoning,
        )

    def failed(self, error: ApiError) -> bytes:
        """The error's body; never used, since a document fails before its first byte."""
        return error.body()
