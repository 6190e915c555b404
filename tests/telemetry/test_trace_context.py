"""The traceparent header: what is continued, and what is not taken for one."""

from __future__ import annotations

import pytest

from antiphon.telemetry.trace_context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_header_is_read_and_written() -> None:
    for flags, sampled in (("01", True), ("00", False), ("03", True)):
        context = TraceContext.parse(f" 00-{TRACE}-{SPAN}-{flags} ")
        assert context == TraceContext(TRACE, SPAN, sampled)
        assert TraceContext.parse(context.header()) == context


def test_a_later_version_may_have_more_fields() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-01-what-ever") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "hello", f"00-{TRACE}-{SPAN}", f"00-{TRACE.upper()}-{SPAN}-01"),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{'0' * 32}-{SPAN}-01"),
        *(f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1"),
    ],
)
def test_what_breaks_the_format_begins_a_new_trace(header: str | None) -> None:
    assert TraceContext.parse(header) is None


def test_new_traces_differ() -> None:
    contexts = [TraceContext.new() for _ in range(50)]
    assert len({c.trace_id for c in contexts}) == len({c.span_id for c in contexts}) == 50
    assert not any(c.sampled for c in contexts)
    assert all(TraceContext.parse(c.header()) == c for c in contexts)
