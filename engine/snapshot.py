"""What an engine says about itself between two steps: counts for load reports and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counts at the end of the last step. Fields that count up never go down in the life of an engine."""

    running: int = 0
    """Sequences that compute: prefilling or decoding."""
    waiting: int = 0
    """Sequences that hold no pages: queued, preempted, or submitted and not yet seen by a step."""
    awaiting_kv: int = 0
    """Reservations that wait for a peer's KV."""
    pinned: int = 0
    """Computed prompts whose pages wait for ``release``."""
    quarantined: int = 0
    """Ended attempts whose pages a peer may still touch."""
    queued_prefill_tokens: int = 0
    """Prompt tokens not yet computed, of all sequences that this engine prefills."""
    pages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Group (``full``, ``sliding``) -> page state -> pages."""
    max_sequence_tokens: int = 0
    steps: int = 0
    """Steps that computed something (counts up)."""
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache (counts up)."""
    prefix_hit_tokens: int = 0
    """Of those, found (counts up)."""
    computed_prompt_tokens: int = 0
    """Prompt tokens computed here, recomputation included (counts up)."""
    received_prompt_tokens: int = 0
    """Prompt tokens whose KV a peer wrote (counts up)."""
    generated_tokens: int = 0
    """Tokens sampled (counts up)."""
    preemptions: int = 0
    """Sequences that gave their pages back for lack of pages (counts up)."""
    stale_commands: int = 0
    """Commands for a request or attempt that was no longer there (counts up)."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Finish reason -> requests (counts up)."""

    def with_waiting(self, waiting: int) -> EngineSnapshot:
        """The same counts with another number of waiting sequences."""
        return self if waiting == self.waiting else replace(self, waiting=waiting)

    @property
    def total_pages(self) -> int:
        """Pages of the full group."""
        return sum(self.pages.get("full", {}).values())

    @property
    def free_pages(self) -> int:
        """Pages of the full group that a new request could take: free, or cached and evictable."""
        states = self.pages.get("full", {})
        return states.get("free", 0) + states.get("cached", 0)
