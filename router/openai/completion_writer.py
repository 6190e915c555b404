"""Writes the answer to a text completion request, as a stream of chunks or as one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from antiphon.router.dispatch.generation import GenerationEnded, TokensArrived
from antiphon.router.openai.completion_answer import CompletionAnswer, CompletionLogprobs, TextPiece
from antiphon.router.openai.errors import ApiError
from antiphon.router.openai.sse import DONE, sse_data
from antiphon.router.openai.usage import TokenCounts, Usage


@dataclass(frozen=True, slots=True)
class CompletionIdentity:
    """What is equal in every chunk of one completion, and what was asked for."""

    completion_id: str
    created: int
    model: str
    fingerprint: str
    choices_per_prompt: int
    with_logprobs: bool
    include_usage: bool
    running_usage: bool

    def document(self, choices: list[dict[str, object]], usage: Usage | None) -> dict[str, object]:
        """A ``text_completion`` object."""
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage,
        }

    def choice(
        self, index: int, text: str, logprobs: CompletionLogprobs, reason: str | None
    ) -> dict[str, object]:
        """A choice, or a part of it."""
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.document() if self.with_logprobs else None,
            "finish_reason": reason,
        }


class CompletionTotals:
    """Counts over all prompts and choices."""

    def __init__(
        self, answers: Sequence[CompletionAnswer], prompt_tokens: int, choices_per_prompt: int
    ) -> None:
        self._answers = answers
        self._choices_per_prompt = choices_per_prompt
        self._prompt_tokens = prompt_tokens
        self._timing: Mapping[str, float] | None = None

    def take_timing(self, timing: Mapping[str, float]) -> None:
        """Report this with the usage."""
        self._timing = timing

    def usage(self, cached_tokens: Sequence[int]) -> Usage:
        """The usage of the whole request; a prompt's cached tokens are those of its first choice."""
        return TokenCounts(
            prompt=self._prompt_tokens,
            cached=sum(cached_tokens[:: self._choices_per_prompt]),
            completion=sum(answer.token_count for answer in self._answers),
            timing=self._timing,
        ).chat_usage()

    def running_usage(self) -> Usage:
        """Tokens so far."""
        completion = sum(answer.token_count for answer in self._answers)
        return TokenCounts(self._prompt_tokens, completion=completion).running_usage()


class CompletionStream:
    """An ``AnswerWriter``: one chunk per piece of text. ``echoes`` are texts to begin with, per choice."""

    streams = True

    def __init__(
        self,
        identity: CompletionIdentity,
        answers: Sequence[CompletionAnswer],
        totals: CompletionTotals,
        echoes: Sequence[str],
    ) -> None:
        self._identity = identity
        self._answers = answers
        self._totals = totals
        self._echoes = echoes

    def open(self) -> bytes:
        """The echoed prompts."""
        empty = CompletionLogprobs()
        return b"".join(
            self._chunk(i, TextPiece(echo, empty), None) for i, echo in enumerate(self._echoes) if echo
        )

    def tokens(self, event: TokensArrived) -> bytes:
        """A chunk, where the tokens complete any text."""
        piece = self._answers[event.choice].feed(event.token_ids, event.logprobs)
        return self._chunk(event.choice, piece, None) if piece.text else b""

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return not self._answers[choice].has_stopped()

    def ended(self, event: GenerationEnded) -> bytes:
        """The last chunk of a choice."""
        answer = self._answers[event.choice]
        return self._chunk(event.choice, answer.finish(), answer.finish_reason(event.kind))

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """The usage chunk where asked for, and the end mark."""
        if not self._identity.include_usage:
            return DONE
        usage = self._identity.document([], self._totals.usage(cached_tokens))
        return sse_data(orjson.dumps(usage)) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return sse_data(error.body())

    def _chunk(self, index: int, piece: TextPiece, reason: str | None) -> bytes:
        document = self._identity.document(
            [self._identity.choice(index, piece.text, piece.logprobs, reason)],
            self._totals.running_usage() if self._identity.running_usage else None,
        )
        if not self._identity.include_usage:
            del document["usage"]
        return sse_data(orjson.dumps(document))


class CompletionDocument:
    """An ``AnswerWriter``: everything at the end."""

    streams = False

    def __init__(
        self,
        identity: CompletionIdentity,
        answers: Sequence[CompletionAnswer],
        totals: CompletionTotals,
        echoes: Sequence[str],
    ) -> None:
        self._identity = identity
        self._answers = answers
        self._totals = totals
        self._texts = [[echo] for echo in echoes]
        self._logprobs = [CompletionLogprobs() for _ in answers]
        self._reasons = [""] * len(answers)

    def open(self) -> bytes:
        """Nothing."""
        return b""

    def tokens(self, event: TokensArrived) -> bytes:
        """Keep the text."""
        self._keep(event.choice, self._answers[event.choice].feed(event.token_ids, event.logprobs))
        return b""

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return not self._answers[choice].has_stopped()

    def ended(self, event: GenerationEnded) -> bytes:
        """Keep what was held back, and the reason."""
        answer = self._answers[event.choice]
        self._keep(event.choice, answer.finish())
        self._reasons[event.choice] = answer.finish_reason(event.kind)
        return b""

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """The document."""
        choices = [
            self._identity.choice(i, "".join(text), self._logprobs[i], self._reasons[i])
            for i, text in enumerate(self._texts)
        ]
        return orjson.dumps(self._identity.document(choices, self._totals.usage(cached_tokens)))

    def failed(self, error: ApiError) -> bytes:
        """The error's body; never used, since a document fails before its first byte."""
        return error.body()

    def _keep(self, choice: int, piece: TextPiece) -> None:
        self._texts[choice].append(piece.text)
        kept, new = self._logprobs[choice], piece.logprobs
        kept.tokens.extend(new.tokens)
        kept.token_logprobs.extend(new.token_logprobs)
        kept.top_logprobs.extend(new.top_logprobs)
        kept.text_offset.extend(new.text_offset)
