"""Completion sets and write leases."""

from __future__ import annotations

import pytest

from antiphon.kv_transfer.completion import CompletionSet, Tick
from antiphon.kv_transfer.leases import WriteLeases, Writer
from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.kv_messages import WriteKey

KEYS = [WriteKey(0, chunk, group) for chunk in range(2) for group in range(2)]


def test_a_set_is_complete_after_every_write_in_any_order() -> None:
    writes = CompletionSet(KEYS, timeout_s=1.0, now=0.0)
    for key in reversed(KEYS[1:]):
        assert writes.tick(key, now=0.1) is Tick.NEW
        assert not writes.complete
    assert writes.missing() == [KEYS[0]]
    assert writes.tick(KEYS[1], 0.2) is Tick.REPEATED
    assert writes.tick(WriteKey(9, 9, 9), 0.2) is Tick.UNKNOWN
    assert writes.tick(KEYS[0], 0.3) is Tick.NEW
    assert writes.complete
    assert not writes.overdue(now=100.0)


def test_the_deadline_is_renewed_by_progress_and_extended_by_asking() -> None:
    writes = CompletionSet(KEYS, timeout_s=1.0, now=0.0)
    assert not writes.overdue(now=1.0)
    assert writes.overdue(now=1.1)
    writes.times_asked += 1
    assert not writes.overdue(now=1.9)
    assert writes.overdue(now=2.1)
    writes.tick(KEYS[0], now=2.5)
    assert writes.times_asked == 0
    assert not writes.overdue(now=3.4)
    writes.tick(KEYS[0], now=3.4)  # a repeat is not progress
    assert writes.overdue(now=3.6)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CompletionSet([], 1.0, 0.0)


def test_one_writer_at_a_time() -> None:
    leases = WriteLeases()
    first, second = Writer("p0", 1), Writer("p1", 5)
    leases.grant("r", 1, first)
    with pytest.raises(IllegalTransition, match="leased to p0"):
        leases.grant("r", 1, second)
    leases.grant("r", 2, second)  # another attempt has other pages
    assert leases.cancel("r", 1) == first
    with pytest.raises(IllegalTransition):
        leases.grant("r", 1, second)  # cancelled is not ended
    assert not leases.end("r", 1, second)
    assert not leases.end("r", 1, Writer("p0", 2)), "another life of the same worker"
    assert leases.end("r", 1, first)
    assert not leases.end("r", 1, first)
    leases.grant("r", 1, second)
    assert leases.cancel("unknown", 1) is None


def test_death_ends_leases_and_silence_does_not() -> None:
    leases = WriteLeases()
    old, new, other = Writer("p0", 1), Writer("p0", 2), Writer("p1", 5)
    leases.grant("a", 1, old)
    leases.grant("b", 1, other)
    assert leases.end_of_life({old, other}) == []
    assert [lease.request_id for lease in leases.of_writer(old)] == ["a"]
    assert [lease.request_id for lease in leases.end_of_life({new, other})] == ["a"]
    assert len(leases) == 1
