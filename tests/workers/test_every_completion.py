"""Completions: right, repeated, late, damaged or of somebody else, in every state of their attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from antiphon.decode_worker.receiver import Key, KvReceiver, ReceiveState
from antiphon.kv_transfer.checksum import crc32_of
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.transport import Memory
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    GrantWrites,
    RefuseWrites,
    WriteChecksum,
    WriteDone,
    WriteKey,
    WritesDrained,
)
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import Message

EPOCH, TIMEOUT_S = 77, 1.0
KEY = ("r", 3)
WRITES = [WriteKey(0, 0, 0), WriteKey(0, 0, 1)]
WRITER, OTHER = Peer(Role.PREFILL, "prefill-0", 9), Peer(Role.PREFILL, "prefill-1", 9)


class Receiving:
    """One attempt of which the first of two writes has arrived."""

    def __init__(self) -> None:
        self.now = 0.0
        self.outcomes: list[str] = []
        self.sent: list[Message] = []
        self.counters: Counter[str] = Counter()
        self.page = np.arange(64, dtype=np.uint8)
        self.span = Memory(self.page.ctypes.data, 64)
        self.receiver = KvReceiver(
            *(EPOCH, TIMEOUT_S, self.send, self, lambda change: None),
            *(self.counters, {"full": self.span}),
            clock=lambda: self.now,
            sever=lambda writer: None,
        )

    def send(self, peer: Peer, message: Message) -> bool:
        self.sent.append(message)
        return True

    def kv_complete(self, key: Key, transfer_s: float) -> None:
        self.outcomes.append("complete")

    def kv_lost(self, key: Key) -> None:
        self.outcomes.append("lost")

    def kv_stuck(self, key: Key) -> None:
        self.outcomes.append("stuck")

    def pages_released(self, key: Key) -> None:
        self.outcomes.append("released")

    def announce(self, writes: Sequence[WriteKey] = WRITES, number: int = 1) -> None:
        message = AnnounceWrites(*KEY, "prefill-0", 9, EPOCH, number, list(writes))
        self.receiver.on_announce(WRITER, message)

    def done(self, write: WriteKey, **changed: Any) -> None:
        writer = changed.pop("writer", WRITER)
        told = {"prefill_epoch": writer.epoch, "decode_epoch": EPOCH, "attempt": KEY[1], **changed}
        message = WriteDone(
            *("r", told["attempt"], told["prefill_epoch"], told["decode_epoch"], write),
            checksum=told.get("checksum"),
        )
        self.receiver.on_write_done(Writer(writer.worker_id, writer.epoch), message)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.receiver.tick()

    def reserved(self) -> None:
        self.receiver.reserve(KEY)

    def receiving(self) -> None:
        self.reserved()
        self.announce()
        self.done(WRITES[0])

    def stopping(self) -> None:
        self.receiving()
        while self.receiver.state(KEY) is not ReceiveState.STOPPING:
            self.wait(0.1)

    def abandoned(self) -> None:
        self.receiving()
        self.receiver.abandon(KEY)

    def complete(self) -> None:
        self.receiving()
        self.done(WRITES[1])

    def lost(self) -> None:
        self.receiving()
        self.receiver.on_drained(WRITER, WritesDrained(*KEY, WRITER.epoch, EPOCH))

    def released(self) -> None:
        self.abandoned()
        self.receiver.on_drained(WRITER, WritesDrained(*KEY, WRITER.epoch, EPOCH))


STATES = ("reserved", "receiving", "stopping", "abandoned", "complete", "lost", "released")
STRAY: dict[str, Callable[[Receiving], None]] = {
    "a repeat": lambda one: one.done(WRITES[0]),
    "of a writer that was not granted": lambda one: one.done(WRITES[1], writer=OTHER),
    "of the writer's earlier life": lambda one: one.done(WRITES[1], prefill_epoch=8),
    "for an earlier life of this worker": lambda one: one.done(WRITES[1], decode_epoch=EPOCH - 1),
    "of an earlier attempt": lambda one: one.done(WRITES[1], attempt=2),
    "of a later attempt": lambda one: one.done(WRITES[1], attempt=4),
    "of a write that was not announced": lambda one: one.done(WriteKey(0, 7, 0)),
}


@pytest.fixture
def one() -> Receiving:
    return Receiving()


@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("state", STATES)
def test_a_stray_completion_completes_nothing_and_is_counted(state: str, stray: str, one: Receiving) -> None:
    getattr(one, state)()
    before, told, counted = one.receiver.state(KEY), list(one.outcomes), one.counters.total()
    STRAY[stray](one)
    STRAY[stray](one)
    assert one.receiver.state(KEY) is before
    assert one.outcomes == told
    assert one.counters.total() == counted + 2


@pytest.mark.parametrize("state", STATES)
def test_the_last_completion_counts_only_while_it_is_waited_for(state: str, one: Receiving) -> None:
    getattr(one, state)()
    told = list(one.outcomes)
    one.done(WRITES[1])
    assert one.outcomes == told + ["complete"] * (state == "receiving")


@pytest.mark.parametrize("state", STATES)
def test_a_damaged_write_is_never_believed(state: str, one: Receiving) -> None:
    getattr(one, state)()
    before, told = one.receiver.state(KEY), list(one.outcomes)
    crc = crc32_of(one.span, np.array([[0, 64]]), 0)
    one.page[5] ^= 1
    one.done(WRITES[1], checksum=WriteChecksum([("full", 0, 64)], crc))
    assert one.outcomes == told
    expected = ReceiveState.STOPPING if state == "receiving" else before
    assert one.receiver.state(KEY) is expected
    if state in ("receiving", "stopping", "abandoned"):
        assert one.counters["checksum_mismatches"] == 1
        one.receiver.on_drained(WRITER, WritesDrained(*KEY, WRITER.epoch, EPOCH))
        assert one.outcomes[-1] == ("released" if state == "abandoned" else "lost")


@pytest.mark.parametrize("state", STATES)
def test_a_completion_that_never_comes_ends_the_wait_and_keeps_the_pages(state: str, one: Receiving) -> None:
    getattr(one, state)()
    one.wait(20 * TIMEOUT_S)
    if state == "reserved":  # nobody was asked to write yet: the engine's own deadline ends this
        assert one.receiver.state(KEY) is ReceiveState.RESERVED
    elif state in ("receiving", "stopping", "abandoned"):
        assert one.receiver.state(KEY) is ReceiveState.ABANDONED
        assert one.receiver.overdue_writers(TIMEOUT_S) == (Writer("prefill-0", 9),)
        assert not {"lost", "released"} & set(one.outcomes)
    else:
        assert one.receiver.state(KEY) is None


@pytest.mark.parametrize("writes", [WRITES[:1], [*WRITES, WriteKey(0, 1, 0)]], ids=["fewer", "more"])
@pytest.mark.parametrize("state", ["receiving", "stopping", "abandoned"])
def test_a_writer_that_announces_other_writes_is_stopped(
    state: str, writes: list[WriteKey], one: Receiving
) -> None:
    """It began the attempt anew: what is complete for it is not what was waited for."""
    getattr(one, state)()
    one.announce(writes)
    assert isinstance(one.sent[-2 if state == "receiving" else -1], RefuseWrites)
    one.done(WRITES[1])
    assert "complete" not in one.outcomes
    one.receiver.on_drained(WRITER, WritesDrained(*KEY, WRITER.epoch, EPOCH))
    assert one.outcomes[-1] == ("released" if state == "abandoned" else "lost")


@pytest.mark.parametrize("state", ["receiving", "stopping", "abandoned"])
def test_a_writer_that_announces_the_same_writes_anew_is_stopped(state: str, one: Receiving) -> None:
    """What it wrote before would complete the set while the same pages are written again."""
    getattr(one, state)()
    one.announce(number=2)
    refused = one.sent[-2 if state == "receiving" else -1]
    assert isinstance(refused, RefuseWrites)
    assert refused.announcement == 2
    for write in WRITES:
        one.done(write)
    assert "complete" not in one.outcomes
    one.receiver.on_drained(WRITER, WritesDrained(*KEY, WRITER.epoch, EPOCH))
    assert one.outcomes[-1] == ("released" if state == "abandoned" else "lost")


@pytest.mark.parametrize("state", STATES)
def test_a_repeated_announcement_is_granted_only_to_the_writer_at_work(state: str, one: Receiving) -> None:
    getattr(one, state)()
    one.sent.clear()
    one.announce()
    granted = [type(message) for message in one.sent] == [GrantWrites]
    assert [getattr(each, "announcement", 1) for each in one.sent] == [1] * len(one.sent)
    assert granted == (state in ("reserved", "receiving"))
    one.receiver.on_announce(OTHER, AnnounceWrites(*KEY, "prefill-1", 9, EPOCH, 1, WRITES))
    assert isinstance(one.sent[-1], RefuseWrites), "two writers for the same pages"
