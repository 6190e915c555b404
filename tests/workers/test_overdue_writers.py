"""A writer that was told to stop and does not say that it did is reported, so that somebody can end it."""

from __future__ import annotations

from collections import Counter

import pytest

from antiphon.decode_worker.receiver import Key, KvReceiver
from antiphon.kv_transfer.leases import Writer
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import AnnounceWrites, WriteKey, WritesDrained
from antiphon.protocol.link import Peer

EPOCH, LEASE_S = 5, 10.0
WRITER = Peer(Role.PREFILL, "prefill-0", 9)


class Nobody:
    """Takes what the receiver reports."""

    def kv_complete(self, key: Key, transfer_s: float) -> None: ...

    def kv_lost(self, key: Key) -> None: ...

    def kv_stuck(self, key: Key) -> None: ...

    def pages_released(self, key: Key) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receiver(clock: Clock) -> KvReceiver:
    receiver = KvReceiver(
        *(EPOCH, 1.0, lambda peer, message: True, Nobody(), lambda change: None, Counter(), {}),
        clock=clock,
        sever=lambda writer: None,
    )
    receiver.reserve(("r", 1))
    receiver.on_announce(WRITER, AnnounceWrites("r", 1, "prefill-0", 9, EPOCH, 1, [WriteKey(0, 0, 0)]))
    return receiver


def test_a_writer_at_work_is_not_overdue_however_long_it_takes(receiver: KvReceiver, clock: Clock) -> None:
    clock.now += 10 * LEASE_S
    assert receiver.overdue_writers(LEASE_S) == ()


def test_a_writer_told_to_stop_is_overdue_after_a_lease(receiver: KvReceiver, clock: Clock) -> None:
    receiver.abandon(("r", 1))
    clock.now += LEASE_S
    assert receiver.overdue_writers(LEASE_S) == ()
    clock.now += 0.1
    assert receiver.overdue_writers(LEASE_S) == (Writer("prefill-0", 9),)


def test_being_told_again_does_not_start_the_lease_anew(receiver: KvReceiver, clock: Clock) -> None:
    receiver.abandon(("r", 1))
    clock.now += LEASE_S / 2
    receiver.on_writer_lost(WRITER)
    receiver.on_writer_up(WRITER)
    clock.now += LEASE_S / 2 + 0.1
    assert receiver.overdue_writers(LEASE_S) == (Writer("prefill-0", 9),)


def test_a_writer_that_has_stopped_is_not_overdue(receiver: KvReceiver, clock: Clock) -> None:
    receiver.abandon(("r", 1))
    receiver.on_drained(WRITER, WritesDrained("r", 1, 9, EPOCH))
    clock.now += 2 * LEASE_S
    assert receiver.overdue_writers(LEASE_S) == ()
