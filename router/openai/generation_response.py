"""Runs one request's generations and writes what comes of them: a stream of events, or one document.

It is an ASGI response of its own because it must listen for the client's leaving from the moment the request
is known, through the wait for admission, to the last byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import SamplingParams
from antiphon.router.api_keys import ANYONE, CALLER
from antiphon.router.dispatch.generation import (
    Generation,
    GenerationEnded,
    KeepAliveDue,
    OutputChannel,
    OutputEvent,
    TokensArrived,
)
from antiphon.router.http_connection import StreamedBody, abort_connection, streamed_body
from antiphon.router.key_limits import LimitReached
from antiphon.router.lifecycle import EndKind, GenerationState
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.ends import error_of
from antiphon.router.openai.errors import ApiError, rate_limited
from antiphon.router.openai.refusals import REFUSALS, note_refusal, refusal_of
from antiphon.router.openai.sse import KEEP_ALIVE, STREAM_HEADERS
from antiphon.router.request_timing import server_timing
from antiphon.router.request_trace import REQUEST_ID, TRACE, GenerationTrace

log = structlog.get_logger("antiphon.router.api")


WORKERS_HEADER = "x-antiphon-workers"
"""Ids of the workers that a request went through until its first token, in that order."""


class AnswerWriter(Protocol):
    """Turns the events of a request's generations into bytes. One writer per request."""

    @property
    def streams(self) -> bool:
        """Whether bytes leave as they are made; otherwise all of them come from ``close``."""
        ...

    def open(self) -> bytes:
        """Bytes before the first token."""
        ...

    def tokens(self, event: TokensArrived) -> bytes:
        """More tokens of one choice."""
        ...

    def wants_more(self, choice: int) -> bool:
        """False once a stop text has ended the choice: its generation can be stopped."""
        ...

    def ended(self, event: GenerationEnded) -> bytes:
        """A choice ended well."""
        ...

    def close(self, cached_tokens: Sequence[int]) -> bytes:
        """All choices have ended; the document, or the end of the stream.

        ``cached_tokens`` are the prompt tokens per choice that a prefix cache held.
        """
        ...

    def failed(self, error: ApiError) -> bytes:
        """The request failed after the first byte."""
        ...


BeforeEnd = Callable[[], Awaitable[None]]
"""What must be done when an answer is whole and before the client learns that it is.

It may raise ``ApiError``: the request has then failed.
"""


OnTiming = Callable[[Mapping[str, float]], None]
"""Takes stage -> seconds; see ``request_timing``."""


class GenerationResponse(Response):
    """The answer to one request: choice i is what follows ``sequences[i]``, a prompt and its parameters."""

    def __init__(
        self,
        context: ApiContext,
        writer: AnswerWriter,
        request_id: str,
        sequences: Sequence[tuple[list[int], SamplingParams]],
        *,
        prompt_field: str,
        received_at: float,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        grammar: GrammarSpec | None = None,
        before_end: BeforeEnd | None = None,
        on_timing: OnTiming | None = None,
    ) -> None:
        """``prompt_field`` is what the request calls its prompt. ``on_timing`` is told what the time went
        into, right before the writer's ``close``."""
        super().__init__()
        self._prompt_field = prompt_field
        self._on_timing = on_timing
        self._before_end = before_end
        self._context = context
        self._writer = writer
        self._priority = priority
        self._channel = OutputChannel()
        self._received_at = received_at
        self._deadline_at = received_at + (timeout_s or context.config.request_timeout_s)
        self._opened = False
        self._started = False
        self._limit_headers: dict[str, str] = {}
        self._body: StreamedBody | None = None
        self._generations = [
            Generation(
                request_id=f"{request_id}-{choice}",
                choice=choice,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                channel=self._channel,
                received_at=received_at,
                deadline_at=self._deadline_at,
                priority=priority,
                cache_salt=cache_salt,
                grammar=grammar,
            )
            for choice, (prompt_token_ids, sampling) in enumerate(sequences)
        ]
        rendered_at = time.monotonic()
        first_of: dict[int, Generation] = {}
        for generation in self._generations:
            first = first_of.setdefault(id(generation.prompt_token_ids), generation)
            generation.first_choice = None if first is generation else first
            generation.timings.rendered_at = rendered_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the answer is written or the client has left."""
        self._body = streamed_body(scope)
        for generation in self._generations:
            generation.trace = GenerationTrace(
                self._context.tracer, scope.get(TRACE), http_request_id=scope.get(REQUEST_ID, "")
            )
        answer = asyncio.create_task(self._within_limits(scope.get(CALLER, ANYONE), send))
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        cut = self._channel.cut
        end = EndKind.CLIENT_GONE
        try:
            await asyncio.wait({answer, gone, cut}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                end = EndKind.FAILED
                answer.result()
        finally:
            # Nothing more can be said to a client that left; a writer stuck in a full socket is cut loose.
            await _cancel(answer)
            await _cancel(gone)
            self._abandon(end)
            if cut.done():
                await abort_connection(scope)

    async def _within_limits(self, caller: str, send: Send) -> None:
        limits = self._context.key_limits
        try:
            with limits.request(caller) as self._limit_headers:
                try:
                    await self._answer(send)
                finally:
                    prompts = {id(g.prompt_token_ids): len(g.prompt_token_ids) for g in self._generations}
                    outputs = sum(len(g.output_token_ids) for g in self._generations)
                    limits.spend_tokens(caller, sum(prompts.values()) + outputs)
        except LimitReached as error:
            self._abandon(EndKind.OVERLOADED)
            self._context.metrics.rejections.labels("key_limit").inc()
            raise rate_limited(f"{error}.", error.retry_after_s) from error

    async def _answer(self, send: Send) -> None:
        try:
            async with self._context.admission.slots(
                len(self._generations), self._priority, self._time_left()
            ):
                for generation in self._generations:
                    self._context.dispatcher.submit(generation)
                with self._keep_alive():
                    await self._pump(send)
        except REFUSALS as error:
            note_refusal(self._context.metrics, error, self._received_at)
            kind, answer = refusal_of(error)
            self._abandon(kind)
            raise answer from error

    async def _pump(self, send: Send) -> None:
        """Write events until every choice has ended."""
        open_choices = len(self._generations)
        while open_choices:
            await self._channel.wait()
            chunks: list[bytes] = []
            while (event := self._channel.take_ready()) is not None:
                if isinstance(event, GenerationEnded) and (error := error_of(event, self._prompt_field)):
                    self._abandon(event.kind)
                    await self._fail(error, chunks, send)
                    return
                if not self._opened:
                    self._opened = True
                    chunks.append(self._writer.open())
                chunks.append(self._bytes_of(event))
                open_choices -= isinstance(event, GenerationEnded)
            if not open_choices:
                if self._on_timing is not None:
                    self._on_timing(self._timing())
                last = self._writer.close([g.cached_tokens for g in self._generations])
                try:
                    await self._finish()
                except ApiError as error:
                    await self._fail(error, chunks, send)
                    return
                chunks.append(last)
            await self._write(b"".join(chunks), send, more=bool(open_choices))
            self._channel.shortcut = self._write_at_once

    def _write_at_once(self, event: TokensArrived) -> bool:
        """The channel's shortcut, once the answer has begun; called by the dispatcher amid its own work."""
        if not self._writer.streams:
            self._bytes_of(event)
            return True
        if self._body is None or not self._body.ready:
            return False
        if body := self._bytes_of(event):
            self._body.write(body)
        return True

    async def _finish(self) -> None:
        if self._before_end is not None:
            await self._before_end()

    def _bytes_of(self, event: OutputEvent) -> bytes:
        match event:
            case TokensArrived():
                body = self._tokens(event)
                if not self._writer.wants_more(event.choice):
                    # Not now: the dispatcher may be in the middle of this very generation.
                    generation = self._generations[event.choice]
                    asyncio.get_running_loop().call_soon(
                        self._context.dispatcher.abandon, generation, EndKind.STOP
                    )
                return body
            case GenerationEnded():
                return self._writer.ended(event)
            case KeepAliveDue():
                return KEEP_ALIVE

    def _tokens(self, event: TokensArrived) -> bytes:
        timings = self._generations[event.choice].timings
        if timings.detokenize_s is not None:
            return self._writer.tokens(event)
        started = time.perf_counter()
        body = self._writer.tokens(event)
        timings.detokenize_s = time.perf_counter() - started
        self._context.metrics.stage_duration.labels("detokenize").observe(timings.detokenize_s)
        return body

    def _timing(self) -> dict[str, float]:
        """The parts of the time to the first token of the choice that had one first, and the whole so far."""
        begun = [g for g in self._generations if g.timings.first_token_at is not None]
        first = min(begun or self._generations, key=lambda g: g.timings.first_token_at or 0.0)
        parts = dict(first.timings.parts(self._received_at))
        if first.timings.detokenize_s is not None:
            parts["detokenize"] = first.timings.detokenize_s
        return {**parts, "total": time.monotonic() - self._received_at}

    async def _write(self, body: bytes, send: Send, *, more: bool) -> None:
        if more and not (body and self._writer.streams):
            return
        if not self._started:
            await self._start(send, len(body))
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _start(self, send: Send, document_bytes: int) -> None:
        self._started = True
        if self._writer.streams:
            headers = STREAM_HEADERS
        else:
            headers = {"content-type": "application/json", "content-length": str(document_bytes)}
            headers["server-timing"] = server_timing(self._timing())
        workers = dict.fromkeys(worker for g in self._generations for worker in g.workers_used)
        headers = headers | self._limit_headers | {WORKERS_HEADER: ", ".join(workers)}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _fail(self, error: ApiError, chunks: list[bytes], send: Send) -> None:
        if not self._started:
            raise error
        self._context.metrics.request_errors.labels(error.metric_type).inc()
        log.warning("stream_failed", code=error.code, message=error.message)
        chunks.append(self._writer.failed(error))
        await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": False})

    def _abandon(self, kind: EndKind) -> None:
        """End what has not ended."""
        for generation in self._generations:
            if generation.state is GenerationState.QUEUED:
                self._context.dispatcher.turn_away(generation, kind)
            else:
                self._context.dispatcher.abandon(generation, kind)

    def _keep_alive(self) -> KeepAliveTimer:
        interval_s = self._context.config.sse_keep_alive_s if self._writer.streams else None
        return KeepAliveTimer(self._channel, interval_s)

    def _time_left(self) -> float:
        return max(self._deadline_at - time.monotonic(), 0.0)


class KeepAliveTimer:
    """Puts a keep-alive event into a channel whenever nothing else came for an interval."""

    def __init__(self, channel: OutputChannel, interval_s: float | None) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> KeepAliveTimer:
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._interval_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                self._interval_s, self._due, self._channel.puts
            )

    def _due(self, puts_then: int) -> None:
        if self._channel.puts == puts_then:
            self._channel.put(KeepAliveDue())
        self._schedule()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
