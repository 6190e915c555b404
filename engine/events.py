"""What comes out of an engine's step, in the order in which it happened."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.protocol.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PagesReserved:
    """A REMOTE_KV request holds its pages. With ``kv_tokens == cached_tokens`` it is already runnable.

    Positions ``cached_tokens <= p < kv_tokens`` must be written by a peer: ``full_pages[i]`` holds positions
    from ``cached_tokens + i * page_size`` (``cached_tokens`` is a multiple of the page size unless nothing is
    missing); ``sliding_pages[i]`` holds positions from ``(sliding_first_page + i) * page_size`` and the list
    covers the missing ones among the window's positions before ``kv_tokens``, down to the start of a page.
    Cached pages, which others may share, are in neither list, nor is headroom. ``attempt`` grew by one for
    each time the sequence was preempted or its KV was lost.
    """

    request_id: str
    attempt: int
    kv_tokens: int
    cached_tokens: int
    full_pages: tuple[int, ...]
    sliding_pages: tuple[int, ...]
    sliding_first_page: int
    reserve_s: float


@dataclass(frozen=True, slots=True)
class KvWritten:
    """Layers of one layer group now hold the KV of one chunk of a PREFILL_ONLY request.

    Raised during the step, on the engine's thread, as soon as the group's last layer has been computed;
    ``group_count`` groups partition each page group's layers in order. ``full_pages`` and ``sliding_pages``
    are (logical page, physical page) pairs that became complete with this chunk, or that the last chunk
    leaves as they are; sliding pages come only with the last chunk, those of the window before ``kv_tokens``.
    """

    request_id: str
    attempt: int
    chunk: int
    layer_group: int
    last_chunk: bool
    full_pages: tuple[tuple[int, int], ...]
    sliding_pages: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A PREFILL_ONLY or COLOCATED request left the queue: its first chunk is planned, or on its way already.

    The chunks of a PREFILL_ONLY request are as many as said here; those of a COLOCATED one may be smaller and
    more, since they share a step's tokens.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    chunks: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """All chunks of a PREFILL_ONLY request are computed; its pages are held until ``release``."""

    request_id: str
    attempt: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """New tokens of a sequence; ``position`` is the index of the first among all its output tokens."""

    request_id: str
    attempt: int
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """Decode ran out of pages: the sequence gave its pages back and waits to be reserved again.

    ``attempt`` is the one that lost its pages; what follows carries the next.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The one end of a request in this engine.

    ``quarantined``: a transport may still touch pages of this attempt; they return to the pool only at
    ``release_quarantined(request_id, attempt)``, which the owner calls at once when no writer was granted.
    A PREFILL_ONLY request that was released ends with reason STOP.
    """

    request_id: str
    attempt: int
    reason: FinishReason
    stop_token_id: int | None
    error: str | None
    first_step_s: float
    decode_s: float
    preemptions: int
    quarantined: bool = False


EngineEvent = (
    PagesReserved
    | KvWritten
    | PrefillStarted
    | PrefillComputed
    | TokensSampled
    | SequencePreempted
    | SequenceFinished
)
