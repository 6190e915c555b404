"""What a worker says about itself to whoever supervises it."""

from __future__ import annotations

import msgspec

from antiphon.protocol.identity import Role


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot of one worker; cheap to take, safe from any thread."""

    worker_id: str
    role: Role
    epoch: int
    endpoint: str
    ready: bool
    """At least one KV peer has shaken hands and its probe pages arrived intact."""
    detail: str
    """Why not ready, or the last failure; empty when there is nothing to say."""
    draining: bool
    failed: str | None
    """Set when the worker cannot go on (its engine raised); the supervisor replaces it."""
    requests: int
    """Requests this worker holds in any state."""
    pages_held: int
    """KV pages that requests hold, quarantined ones included; 0 when idle."""
    pages_quarantined: int
    """Pages of ended requests that a peer may still write; part of ``pages_held``."""
    queued_prefill_tokens: int
    kv_peers: tuple[str, ...]
    """Workers whose handshake and probe succeeded."""
    counters: dict[str, int]
    """Totals since start: stale messages dropped, retries, resends, failures by stage, bytes moved."""
    waiting: int = 0
    """Requests that hold no pages yet."""
    computed_prompt_tokens: int = 0
    """Prompt tokens computed since the start."""
    page_use: float = 0.0
    """Share of the pages of full-attention layers that requests hold, 0 to 1."""
    kv_paths: dict[str, tuple[str, float]] = {}
    """Ready KV peer -> how KV moves between the two (``mapped``, ``direct`` or ``tcp``, see KvProbeResult),
    and bytes/s of the self-test."""
    overdue_writers: tuple[tuple[str, int], ...] = ()
    """(worker id, epoch) of peers told to stop writing here longer ago than a lease, which have not said that
    they did; their pages stay set aside until the supervisor has ended that life."""
