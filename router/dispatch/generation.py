"""One generation: the sequence that one choice of a request becomes, and the channel it answers on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import KvTicket, SamplingParams, TokenLogprobs
from antiphon.router.lifecycle import EndKind, GenerationState, check_move
from antiphon.router.request_timing import Timings
from antiphon.router.request_trace import GenerationTrace


@dataclass(slots=True)
class TokensArrived:
    """New output tokens of one choice. Not frozen, which would double the cost of making one per token."""

    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """The one end of one choice. ``detail`` is for the client and never holds its text."""

    choice: int
    kind: EndKind
    detail: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class KeepAliveDue:
    """Nothing came for a while; the stream should show that it lives."""


OutputEvent = TokensArrived | GenerationEnded | KeepAliveDue


class OutputChannel:
    """What the choices of one request produced and its client has not taken yet; one reader.

    ``held_tokens`` is what the slow-client bound is compared with. ``cut`` completes when the client is to be
    disconnected without another byte, since its writer may be stuck in the socket.

    While the reader waits, ``shortcut`` is offered tokens first: what it takes needs no turn of the reader's
    task. It returns False for what the reader must take; its crash is the reader's.
    """

    def __init__(self) -> None:
        self.held_tokens = 0
        self.puts = 0
        """Events ever put; tells a timer whether anything came."""
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: deque[OutputEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.shortcut: Callable[[TokensArrived], bool] | None = None

    def put(self, event: OutputEvent) -> None:
        """Hand an event to the reader, in order: through the shortcut, or as one to wake up for."""
        self.puts += 1
        if isinstance(event, TokensArrived):
            if self._waiter is not None and not self._waiter.done() and self.shortcut is not None:
                try:
                    if self.shortcut(event):
                        return
                except Exception as error:
                    self._waiter.set_exception(error)
                    return
            self.held_tokens += len(event.token_ids)
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_ready(self) -> OutputEvent | None:
        """The next event if there is one."""
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, TokensArrived):
            self.held_tokens -= len(event.token_ids)
        return event

    async def wait(self) -> None:
        """Return once there is an event to take. Cancelling loses nothing.

        Raises:
            Exception: what the shortcut raised.
        """
        if self._events:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


ATTEMPT_STRIDE = 1 << 16
"""Distance between attempts that the router starts.

A decode worker that reserves pages anew counts on by one. With room in between, what it says about its own
next attempt can never be taken for the router's, which may be on its way to it at that moment.
"""


@dataclass(slots=True)
class Generation:
    """State that the dispatcher keeps of one choice.

    Times ending in ``_at`` are readings of ``time.monotonic``; the event loop's own clock is too coarse for
    latencies of single tokens.

    ``attempt`` names the attempt in every message. ``failures`` counts attempts that failed; a preemption is
    none. ``output_token_ids`` are all tokens of all attempts, in order.
    """

    request_id: str
    choice: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    channel: OutputChannel
    received_at: float
    deadline_at: float
    priority: int = 0
    cache_salt: str = ""
    grammar: GrammarSpec | None = None
    first_choice: Generation | None = None
    """The first choice of the same prompt, whose pages this one may share."""
    prefix_keys: list[bytes] = field(default_factory=list)

    state: GenerationState = GenerationState.QUEUED
    attempt: int = 0
    failures: int = 0
    decode_worker_id: str | None = None
    prefill_worker_id: str | None = None
    refused_by: set[str] = field(default_factory=set)
    """Workers of the leg being placed that did not take it."""
    ticket: KvTicket | None = None
    """What the prefill leg of this attempt may write."""
    output_token_ids: list[int] = field(default_factory=list)
    last_token_at: float | None = None
    decode_cached_tokens: int | None = None
    prefill_cached_tokens: int | None = None
    workers_used: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    trace: GenerationTrace = field(default_factory=GenerationTrace)
    deadline_timer: asyncio.TimerHandle | None = None
    wait_timer: asyncio.TimerHandle | None = None
    """For a worker to appear or to have room, or for the prefill leg's report after the end."""
    closing: EndKind | None = None
    """The end is known, only the prefill worker's report is outstanding."""
    end: GenerationEnded | None = None

    def move(self, to: GenerationState) -> None:
        """Change state.

        Raises:
            IllegalTransition: the lifecycle table has no such edge.
        """
        check_move(self.state, to)
        self.state = to

    def believes(self, attempt: int) -> bool:
        """Whether tokens of this attempt are part of the answer.

        Those of an attempt that decode went on from by itself are: they are part of what it goes on with.
        """
        return attempt <= self.attempt and attempt // ATTEMPT_STRIDE == self.attempt // ATTEMPT_STRIDE

    def next_attempt(self) -> None:
        """Begin an attempt that no worker has heard of."""
        self.attempt = (self.attempt // ATTEMPT_STRIDE + 1) * ATTEMPT_STRIDE

    @property
    def recomputes(self) -> bool:
        """Whether this attempt repeats work that was lost; a worker that took nothing has lost nothing."""
        by_decode = self.attempt % ATTEMPT_STRIDE > 0
        return by_decode or self.failures > 0 or bool(self.output_token_ids)

    @property
    def has_its_kv(self) -> bool:
        """Whether decode goes on without the prefill leg, of which at most a report is outstanding."""
        return self.state is GenerationState.DECODING

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that some prefix cache spared this request in its first attempt."""
        cached = max(self.decode_cached_tokens or 0, self.prefill_cached_tokens or 0)
        return min(cached, len(self.prompt_token_ids))

    def all_token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt_token_ids + self.output_token_ids

    def deliver(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Record new output tokens and hand them to the reader."""
        tokens = list(token_ids)
        self.output_token_ids.extend(tokens)
        self.channel.put(TokensArrived(self.choice, tokens, logprobs))

    def finish_with(
        self, kind: EndKind, detail: str | None = None, retry_after_s: float | None = None
    ) -> GenerationEnded:
        """End the generation and tell the reader.

        Raises:
            IllegalTransition: it has ended before.
        """
        if self.end is not None:
            raise IllegalTransition(f"generation {self.request_id} ended twice: {self.end.kind} and {kind}")
        self.move(GenerationState.ENDED)
        self.end = GenerationEnded(self.choice, kind, detail, retry_after_s)
        self.channel.put(self.end)
        if kind is EndKind.SLOW_CLIENT and not self.channel.cut.done():
            self.channel.cut.set_result(None)
        return self.end
