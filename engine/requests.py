"""What goes into an engine: requests and commands. What comes out is in engine/events.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import SamplingParams


class RequestKind(StrEnum):
    """Which part of a request's life this engine runs."""

    COLOCATED = "colocated"
    """Prefill and decode here."""
    PREFILL_ONLY = "prefill_only"
    """Compute KV of all tokens but the last, never sample; the pages stay until ``release``."""
    REMOTE_KV = "remote_kv"
    """Reserve pages, wait for a peer's KV, then decode from the last prompt token on."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as an engine sees it: token ids in, token ids out.

    ``output_token_ids`` were emitted by earlier attempts; they count against ``sampling.max_tokens``, feed
    penalties, and are never emitted again. ``sampling`` is None for PREFILL_ONLY.
    """

    request_id: str
    attempt: int
    kind: RequestKind
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    priority: int = 0
    deadline_s: float | None = None
    """Time left at submission."""
    cache_salt: str = ""
    """Prefix pages are shared only between requests of the same salt."""
    grammar: GrammarSpec | None = None
    """What the output must look like; only of requests that sample."""
    shares_prompt: bool = False
    """Of a COLOCATED one: whole pages of its tokens are expected in the prefix cache. Where they are gone by
    the time that there is room for it, it is REMOTE_KV."""
    accepted: bool = False
    """A worker has taken it before: it goes on, however many newer ones fill the queue meanwhile."""
