"""W3C trace context: which trace a piece of work belongs to, across processes.

Read from and written as the ``traceparent`` header, https://www.w3.org/TR/trace-context/. There is always
one, so that log lines of all processes can be joined; whether spans are recorded is another matter.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace. Ids are lower-case hex: 32 digits of the trace, 16 of the span."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def new(cls, *, sampled: bool = False) -> TraceContext:
        """The beginning of a trace."""
        return cls(_random_hex(16), _random_hex(8), sampled)

    @classmethod
    def parse(cls, header: str | None) -> TraceContext | None:
        """What a ``traceparent`` header says; None when it is absent or breaks the format."""
        found = _TRACEPARENT.fullmatch(header.strip()) if header else None
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    def header(self) -> str:
        """The ``traceparent`` header that continues here."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def _random_hex(size_bytes: int) -> str:
    """Random and never all zeros, which the standard calls invalid."""
    while not int(text := secrets.token_hex(size_bytes), 16):
        pass
    return text
