"""The frozen messages of liveness and of requests, one class per message, grouped by who sends them to whom.

Identity of a unit of work is ``(request_id, attempt)``; everything that touches pages carries the epoch of
the engine that owns them, so that nothing from before a restart is believed. Clocks are never compared
across processes: fields ending in ``_s`` are durations. What workers say of KV pages is in
``protocol.kv_messages``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.identity import Role


class FinishReason(StrEnum):
    """Why a request ended; every request ends exactly once with one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    GRAMMAR = "grammar"
    """The output cannot go on by its grammar: no other attempt would do better."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


# ---------------------------------------------------------------------------------------------- sampling


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen. Randomness is a function of (seed, position) only."""

    max_tokens: int
    """Output tokens counted over all attempts of the request."""
    seed: int
    """Assigned at admission when the client gives none, so that a retry continues the same text."""
    temperature: float = 1.0
    """0 is greedy: the highest logit, the lowest id among equals."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Stop ids do not stop (benchmarks)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs. 0: of the chosen token only. n: and of the n best."""


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities at one output position (natural log, after temperature 1 and no truncation)."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


# ----------------------------------------------------------------------------------------------- liveness


class Hello(Message, frozen=True):
    """First message on every link, both ways; a peer of another protocol version is refused."""

    protocol_version: int
    role: Role
    worker_id: str
    epoch: int


class Heartbeat(Message, frozen=True):
    """Sent by both ends of a link at a fixed interval; renews the peer's lease."""

    epoch: int


class LoadReport(Message, frozen=True):
    """Worker -> router, with every heartbeat: what placement needs to know."""

    epoch: int
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    queued_prefill_tokens: int
    draining: bool = False
    """Finishes what it has and takes nothing new."""
    kv_peers: dict[str, int] = {}
    """Prefill only: decode workers (id -> epoch) whose test page arrived intact.

    The router pairs a prefill worker with these alone; a deployment is ready once there is such a pair.
    """
    computes_prompts: bool = False
    """Decode only: computes every prompt itself, so that it needs no prefill worker."""


# -------------------------------------------------------------------------------------- router -> decode


class GenerateRequest(Message, frozen=True):
    """Router -> decode: reserve pages for this request, then decode it.

    ``output_token_ids`` are tokens that an earlier attempt already emitted; they count against
    ``sampling.max_tokens`` and are never sent again.
    """

    request_id: str
    attempt: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Smaller runs first."""
    deadline_s: float | None = None
    """Time left for the whole request at the moment of sending."""
    cache_salt: str = ""
    traceparent: str = ""
    """The trace that this attempt belongs to, as in W3C's header of that name."""
    grammar: GrammarSpec | None = None
    """What the output must look like, over all attempts."""
    fork_of: str = ""
    """Id of a request of the same prompt at the same worker, whose pages this one shares as soon as that one
    has spoken; without meaning when that request is not there."""


class AbortRequest(Message, frozen=True):
    """Router -> prefill and decode: stop working on any attempt up to ``attempt``."""

    request_id: str
    attempt: int
    reason: str


class TokensAck(Message, frozen=True):
    """Router -> decode: every batch up to ``sequence_number`` has been taken."""

    sequence_number: int


# -------------------------------------------------------------------------------------- decode -> router


class KvTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The right to ask a decode worker for permission to write one request's KV.

    Positions ``skip_tokens <= p < kv_tokens`` are wanted. ``full_pages[i]`` holds positions from
    ``(skip_tokens // page_size + i) * page_size``; ``skip_tokens`` is a multiple of the page size.
    ``sliding_pages[i]`` holds positions from ``(sliding_first_page + i) * page_size`` and the list covers at
    least those of the last ``window_tokens`` positions before ``kv_tokens`` that are wanted.
    """

    decode_worker_id: str
    decode_epoch: int
    request_id: str
    attempt: int
    kv_tokens: int
    skip_tokens: int
    full_pages: list[int]
    sliding_pages: list[int]
    sliding_first_page: int


class Reserved(Message, frozen=True):
    """Decode -> router: pages are held; choose a prefill worker now.

    ``ticket`` is None when there is nothing to prefill (a one-token or fully cached prompt): the request
    is already runnable. ``attempt`` is larger than the router's when decode preempted the sequence and
    needs its KV again; the prompt is then (prompt + tokens emitted so far) without its last token.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    ticket: KvTicket | None
    reserve_s: float
    computes_prompt: bool = False
    """The decode worker computes the missing KV itself; ``ticket`` is None then."""


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a request as the engine saw it."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    transfer_s: float = 0.0
    first_step_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0


class TokenOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """New tokens of one request; ``position`` is the index of the first among the request's output tokens."""

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    first_step_s: float | None = None
    """With an attempt's first tokens: from the moment its KV was complete to these tokens."""


class TokenBatch(Message, frozen=True):
    """Decode -> router: all new tokens of one step for this router, numbered from 1 without gaps."""

    epoch: int
    sequence_number: int
    outputs: list[TokenOutput]


class RequestRefused(Message, frozen=True):
    """Worker -> router: the request was not taken (queue full, larger than the cache, draining)."""

    request_id: str
    attempt: int
    reason: str
    retryable: bool


# ------------------------------------------------------------------------------- router <-> prefill worker


class PrefillRequest(Message, frozen=True):
    """Router -> prefill: compute KV of ``token_ids[:-1]`` and write it where the ticket says.

    ``token_ids`` are prompt + already emitted tokens; ``len(token_ids) - 1 == ticket.kv_tokens``.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    ticket: KvTicket
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    traceparent: str = ""
    """As in GenerateRequest."""


class PrefillFinished(Message, frozen=True):
    """Prefill -> router: every write is done and notified; durations of the parts."""

    request_id: str
    attempt: int
    cached_tokens: int
    queue_s: float
    compute_s: float
    transfer_tail_s: float
    bytes_sent: int


class PrefillFailed(Message, frozen=True):
    """Prefill -> router: this attempt will not complete. ``stage`` as in TransferError, or ``compute``."""

    request_id: str
    attempt: int
    stage: str
    reason: str


RequestMessage = (
    Hello
    | Heartbeat
    | LoadReport
    | GenerateRequest
    | AbortRequest
    | TokensAck
    | Reserved
    | TokenBatch
    | RequestRefused
    | PrefillRequest
    | PrefillFinished
    | PrefillFailed
)
"""Liveness, and what routers and workers say of requests."""
