"""Times and bounds of links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times and bounds of every link of a node."""

    heartbeat_s: float = 1.0
    lease_s: float = 15.0
    greeting_timeout_s: float = 2.0
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    max_unacknowledged: int = 16_384
    """Messages to one peer; beyond it the peer is lost."""
    max_unacknowledged_bytes: int = 64 * 1024 * 1024
