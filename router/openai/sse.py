"""Framing of server-sent events."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: it keeps proxies from closing a silent stream, and clients skip it."""

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    # Asks nginx-like proxies to pass every event on at once.
    "x-accel-buffering": "no",
}


def sse_data(body: bytes) -> bytes:
    """An unnamed event. ``body`` is one line, as every JSON serialiser here writes it."""
    return b"data: " + body + b"\n\n"


def sse_event(name: str, body: bytes) -> bytes:
    """A named event."""
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
