"""Writes the answer to a Responses request, as a stream of events or as one document."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from antiphon.router.dispatch.generation import GenerationEnded, TokensArrived
from antiphon.router.lifecycle import EndKind
from antiphon.router.openai.chat_writer import ChatChoices
from antiphon.router.openai.errors import ApiError
from antiphon.router.openai.response_store import JsonObject
from antiphon.router.openai.responses_document import ResponseFacts
from antiphon.router.openai.responses_output import Event, ResponseOutput
from antiphon.router.openai.sse import sse_event


class ResponseWriter:
    """An ``AnswerWriter`` for both forms; without ``streams`` the events are not written."""

    def __init__(
        self, facts: ResponseFacts, choices: ChatChoices, output: ResponseOutput, *, streams: bool
    ) -> None:
        self._facts = facts
        self._choices = choices
        self._output = output
        self._streams = streams
        self._sequence = 0
        self._cut_short = False
        self._finished: JsonObject | None = None

    @property
    def streams(self) -> bool:
        """Whether events leave as they are made."""
        return self._streams

    def open(self) -> bytes:
        """The response exists, and is worked on."""
        started: JsonObject = {"response": self._facts.document("in_progress", [])}
        return self._write([("response.created", started), ("response.in_progress", started)])

    def tokens(self, event: TokensArrived) -> bytes:
        """An event per delta, and those of items that begin or end."""
        return self._write([e for shown in self._choices.tokens(event) for e in self._output.add(shown)])

    def wants_more(self, choice: int) -> bool:
        """False after a stop text."""
        return self._choices.wants_more(choice)

    def ended(self, event: GenerationEnded) -> bytes:
        """What was held back, and the end of the last item."""
        shown, _ = self._choices.ended(event)
        events = [e for item in shown for e in self._output.add(item)]
        self._cut_short = event.kind is EndKind.LENGTH and self.wants_more(event.choice)
        return self._write([*events, *self._output.finish(complete=not self._cut_short)])

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """The finished response."""
        self._choices.close(cached_tokens)
        status = "incomplete" if self._cut_short else "completed"
        document = self._facts.document(
            status,
            self._output.documents(),
            completed_at=None if self._cut_short else int(time.time()),
            counts=self._choices.counts,
            incomplete_reason="max_output_tokens" if self._cut_short else None,
        )
        self._finished = document
        if not self._streams:
            return orjson.dumps(document)
        return self._write([(f"response.{status}", {"response": document})])

    def finished(self) -> JsonObject:
        """The finished response, as it is stored; there is one after ``close``."""
        if self._finished is None:
            raise RuntimeError("the response has not finished")
        return self._finished

    def failed(self, error: ApiError) -> bytes:
        """The response failed after its first event."""
        if self._finished is not None and self._streams:
            self._sequence -= 1  # that it had finished was written, but never left
        self._output.finish(complete=False)
        document = self._facts.document(
            "failed", self._output.documents(), error={"code": _failure_code(error), "message": error.message}
        )
        return self._write([("response.failed", {"response": document})])

    def _write(self, events: Sequence[Event]) -> bytes:
        if not self._streams:
            return b""
        frames = []
        for kind, fields in events:
            body = {"type": kind, "sequence_number": self._sequence, **fields}
            frames.append(sse_event(kind, orjson.dumps(body)))
            self._sequence += 1
        return b"".join(frames)


def _failure_code(error: ApiError) -> str:
    """What the Responses API, which knows few codes of failed responses, calls an error."""
    if error.status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
