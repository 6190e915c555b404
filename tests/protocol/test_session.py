"""A session delivers exactly once and in order, whatever its connection does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.protocol.errors import WireError
from antiphon.protocol.session import Session, SessionOverflow


def make() -> Session:
    return Session(max_payloads=1000, max_bytes=1_000_000)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(["queue", "deliver", "lose", "cut", "acknowledge"]), max_size=200))
def test_every_payload_arrives_once_and_in_order(script: list[str]) -> None:
    sender, receiver = make(), make()
    in_flight: list[tuple[int, bytes]] = []
    queued: list[bytes] = []
    arrived: list[bytes] = []
    for action in [*script, "cut", *["deliver"] * (len(script) + 1)]:
        if action == "queue":
            queued.append(f"payload {len(queued)}".encode())
            sender.queue(queued[-1])
        elif action == "acknowledge":
            sender.acknowledge(receiver.tell())
        elif action in ("lose", "cut"):  # a cut connection loses what was under way, then resumes
            in_flight.clear()
            sender.resume(receiver.tell())
        in_flight += sender.take_unsent()
        if action == "deliver" and in_flight:
            number, payload = in_flight.pop(0)
            if receiver.accept(number):
                arrived.append(payload)
    assert arrived == queued
    sender.acknowledge(receiver.tell())
    assert sender.unacknowledged == 0


def test_repeat_is_recognised() -> None:
    receiver = make()
    assert receiver.accept(1)
    assert not receiver.accept(1)
    assert receiver.received == 1


def test_bytes_that_nobody_acknowledged_are_counted_on_both_sides() -> None:
    sender, receiver = make(), make()
    for size in (10, 30):
        sender.queue(bytes(size))
    for number, payload in sender.take_unsent():
        assert receiver.accept(number, len(payload))
    assert not receiver.accept(2, 30)
    assert (sender.unacknowledged_bytes, receiver.untold_bytes) == (40, 40)
    sender.acknowledge(receiver.tell())
    assert (sender.unacknowledged_bytes, receiver.untold_bytes) == (0, 0)


def test_gap_and_foreign_acknowledgement_are_errors() -> None:
    session = make()
    with pytest.raises(WireError, match="message 2 follows message 0"):
        session.accept(2)
    with pytest.raises(WireError, match="acknowledgement of message 1"):
        session.acknowledge(1)


@pytest.mark.parametrize(("payloads", "size"), [(3, 1_000), (1_000, 30)])
def test_bounds_hold(payloads: int, size: int) -> None:
    session = Session(payloads, size)
    for _ in range(3):
        session.queue(b"0123456789")
    with pytest.raises(SessionOverflow, match=r"3 messages \(30 bytes\)"):
        session.queue(b"0123456789")
    session.take_unsent()
    session.acknowledge(1)
    session.queue(b"0123456789")
