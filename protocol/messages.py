"""The frozen messages of a deployment, one class per message, grouped by who sends them to whom.

Identity of a unit of work is ``(request_id, attempt)``; everything that touches pages carries the epoch of
the engine that owns them, so that nothing from before a restart is believed. Clocks are never compared
across processes: fields ending in ``_s`` are durations.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.identity import KvFingerprint, Role


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


# ------------------------------------------------------------------------------------- prefill <-> decode


class MemoryRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One page group's registered memory on one rank: ``pages`` pages of ``page_bytes`` from ``address``."""

    group: str
    """``full`` or ``sliding``."""
    address: int
    pages: int
    page_bytes: int
    memory: str
    """``DRAM`` or ``VRAM``."""
    device: int


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's transfer agent and what it registered."""

    rank: int
    agent_name: str
    agent_metadata: bytes
    regions: tuple[MemoryRegion, ...]


class KvHello(Message, frozen=True):
    """Prefill -> decode: who I am; answered by KvWelcome or KvRefused."""

    worker_id: str
    epoch: int
    fingerprint: KvFingerprint
    tensor_parallel: int
    ranks: tuple[RankMemory, ...]
    broken: bool = False
    """Its connection to you broke: end what is left of it before you welcome it."""


class KvWelcome(Message, frozen=True):
    """Decode -> prefill: compatible; here is where my pages are. ``probe_page`` may be written as a test."""

    worker_id: str
    epoch: int
    fingerprint: KvFingerprint
    tensor_parallel: int
    ranks: tuple[RankMemory, ...]
    probe_pages: dict[str, int]
    """A page per group that belongs to nobody, for the readiness self-test."""
    staging: tuple[int, int] | None = None
    """(first, count) of the staging slots that are this writer's alone; None: it writes pages directly."""
    severed: bool = False
    """Nothing that came over an earlier connection of yours can change a page or a slot of mine any more."""


class KvRefused(Message, frozen=True):
    """Decode -> prefill: incompatible; each difference names both values."""

    differences: list[str]


class KvProbe(Message, frozen=True):
    """Prefill -> decode: every rank wrote its part of the probe of ``prefill_epoch``; check and answer."""

    prefill_epoch: int
    decode_epoch: int
    written_bytes: int = 0
    """Of the timed rounds that followed the first one, all ranks together."""
    seconds: float = 0.0
    """How long those rounds took."""


class KvProbeResult(Message, frozen=True):
    """Decode -> prefill: whether the probe arrived intact; both sides are ready only after ``ok``."""

    decode_epoch: int
    ok: bool
    detail: str
    path: str = ""
    """``tcp``, or ``direct``: shared memory, CUDA IPC or RDMA."""


class WriteKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One element of a completion set: the writes of one source rank, chunk and layer group."""

    source_rank: int
    chunk: int
    layer_group: int


class AnnounceWrites(Message, frozen=True):
    """Prefill -> decode, before its first write: may I write, and this is the whole set to expect."""

    request_id: str
    attempt: int
    prefill_worker_id: str
    prefill_epoch: int
    decode_epoch: int
    writes: list[WriteKey]


class GrantWrites(Message, frozen=True):
    """Decode -> prefill: you are now the only writer of these pages."""

    request_id: str
    attempt: int
    decode_epoch: int


class RefuseWrites(Message, frozen=True):
    """Decode -> prefill: the reservation is gone or another writer holds it; write nothing."""

    request_id: str
    attempt: int
    decode_epoch: int
    reason: str


class WriteChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the bytes of one write must be where they arrived."""

    spans: list[tuple[str, int, int]]
    """(page group, offset, length) in bytes within the receiver's memory of that group, in order."""
    crc32: int
    """Over the spans' bytes, one after the other."""


class WriteDone(Message, frozen=True):
    """Prefill -> decode, as the transfer's own notification: these bytes are in your memory."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    key: WriteKey
    checksum: WriteChecksum | None = None
    """Only with ``transfer.verify_checksums``."""
    part: int = 0
    parts: int = 1
    """This is one of so many parts; the write is done with the last of them."""


class MissingWrites(Message, frozen=True):
    """Decode -> prefill: the set's deadline passed without these; notify or write them again."""

    request_id: str
    attempt: int
    decode_epoch: int
    keys: list[WriteKey]


class CancelWrites(Message, frozen=True):
    """Decode -> prefill: stop writing; answer WritesDrained once no write can still land."""

    request_id: str
    attempt: int
    decode_epoch: int


class WritesDrained(Message, frozen=True):
    """Prefill -> decode: for this attempt and epoch nothing of mine will be written any more."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int


class WritesFailed(Message, frozen=True):
    """Prefill -> decode: the set will not be completed, and nothing more will be written."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    stage: str
    reason: str


AnyMessage = (
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
    | KvHello
    | KvWelcome
    | KvRefused
    | KvProbe
    | KvProbeResult
    | AnnounceWrites
    | GrantWrites
    | RefuseWrites
    | WriteDone
    | MissingWrites
    | CancelWrites
    | WritesDrained
    | WritesFailed
)
"""Every message that may stand alone on a wire."""
