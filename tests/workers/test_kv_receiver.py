"""The receiving state machine in every order of events: no page is given back while it may be written."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.decode_worker.outbox import Outbox, OutboxFull
from antiphon.decode_worker.receiver import Key, KvReceiver, ReceiveState
from antiphon.kv_transfer.leases import Writer
from antiphon.protocol.errors import WireError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    CancelWrites,
    GrantWrites,
    MissingWrites,
    WriteDone,
    WriteKey,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import Message, TokenOutput

EPOCH = 77
KEYS = [WriteKey(0, chunk, group) for chunk in range(2) for group in range(2)]
WRITERS = [Peer(Role.PREFILL, f"prefill-{index}", 10 + index) for index in range(2)]


class ReceiverMachine(RuleBasedStateMachine):
    """Two writers, a few attempts, time, death and messages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sent: list[tuple[Peer, Message]] = []
        self.expected = 0
        self.may_write: dict[Key, Writer] = {}
        """Model: who was granted an attempt and has neither finished, nor said that it stopped, nor died."""
        self.written: dict[Key, set[WriteKey]] = {}
        self.ended: dict[Key, str] = {}
        self.next_attempt = 1
        self.open: list[Key] = []
        self.broken: dict[Writer, set[Key]] = {}
        """Model: attempts whose writer lost its connection; what it sent may land until that is severed."""
        self.severing: set[Writer] = set()
        self.receiver = KvReceiver(
            *(EPOCH, 1.0, self._send, self, self._expect, Counter(), {}),
            clock=lambda: self.now,
            sever=self._sever,
        )

    def _sever(self, writer: Writer) -> None:
        assert writer not in self.severing, "one at a time"
        self.severing.add(writer)

    def _send(self, peer: Peer, message: Message) -> bool:
        self.sent.append((peer, message))
        if isinstance(message, GrantWrites):
            key, writer = (message.request_id, message.attempt), Writer(peer.worker_id, peer.epoch)
            assert self.may_write.get(key, writer) == writer, "two writers for the same pages"
            if key not in self.may_write:
                self.may_write[key], self.written[key] = writer, set()
        return True

    def _expect(self, change: int) -> None:
        self.expected += change

    # What the receiver reports. Each must be justified by the model.

    def kv_complete(self, key: Key, transfer_s: float) -> None:
        assert self.written[key] == set(KEYS)
        self._close(key, "complete")

    def kv_lost(self, key: Key) -> None:
        assert key not in self.may_write, "pages given back while their writer may write"
        self._close(key, "lost")

    def kv_stuck(self, key: Key) -> None:
        self.open.remove(key)
        self.ended[key] = "stuck"

    def pages_released(self, key: Key) -> None:
        assert key not in self.may_write, "pages given back while their writer may write"
        assert self.ended[key] in ("stuck", "abandoned")
        self.ended[key] = "released"

    def _close(self, key: Key, how: str) -> None:
        self.open.remove(key)
        self.may_write.pop(key, None)
        self.ended[key] = how

    # What may happen.

    @rule()
    def reserve(self) -> None:
        key = "r", self.next_attempt
        self.next_attempt += 1
        self.open.append(key)
        self.receiver.reserve(key)

    @precondition(lambda self: self.next_attempt > 1)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def announce(self, data: st.DataObject, writer: Peer) -> None:
        attempt = data.draw(st.integers(1, self.next_attempt))
        message = AnnounceWrites("r", attempt, writer.worker_id, writer.epoch, EPOCH, 1, KEYS)
        self.receiver.on_announce(writer, message)

    @precondition(lambda self: self.may_write)
    @rule(data=st.data())
    def write_done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.may_write)))
        write = data.draw(st.sampled_from(KEYS))
        writer = self.may_write[key]
        self.written[key].add(write)
        self.receiver.on_write_done(writer, WriteDone(*key, writer.epoch, EPOCH, write))

    @precondition(lambda self: self._connected())
    @rule(data=st.data(), failed=st.booleans())
    def writer_ends(self, data: st.DataObject, failed: bool) -> None:
        key = data.draw(st.sampled_from(self._connected()))
        writer = self.may_write.pop(key)
        peer = next(p for p in WRITERS if p.worker_id == writer.worker_id)
        if failed:
            self.receiver.on_failed(peer, WritesFailed(*key, writer.epoch, EPOCH, "transfer", "x"))
        else:
            self.receiver.on_drained(peer, WritesDrained(*key, writer.epoch, EPOCH))

    @precondition(lambda self: self.may_write)
    @rule(data=st.data(), says_drained=st.booleans(), at_once=st.booleans())
    def connection_breaks(self, data: st.DataObject, says_drained: bool, at_once: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.may_write)))
        writer = self.may_write[key]
        peer = next(p for p in WRITERS if p.worker_id == writer.worker_id)
        self.broken.setdefault(writer, set()).add(key)
        self.receiver.on_failed(peer, WritesFailed(*key, writer.epoch, EPOCH, "connection", "x"))
        if says_drained:  # of its own end of the connection, which proves nothing
            self.receiver.on_drained(peer, WritesDrained(*key, writer.epoch, EPOCH))
        if at_once:
            self._severed(writer)

    @precondition(lambda self: self.severing)
    @rule(data=st.data())
    def connections_are_severed(self, data: st.DataObject) -> None:
        self._severed(data.draw(st.sampled_from(sorted(self.severing))))

    def _severed(self, writer: Writer) -> None:
        self.severing.remove(writer)
        for key in self.broken.pop(writer, set()):
            self.may_write.pop(key, None)
        self.receiver.on_severed(writer)

    def _connected(self) -> list[Key]:
        """Attempts of which the writer's word is the truth: no broken connection holds what it sent."""
        return sorted(self.may_write.keys() - set().union(*self.broken.values()))

    @precondition(lambda self: self.next_attempt > 1)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def stray_end(self, data: st.DataObject, writer: Peer) -> None:
        """A message of another life, or about an attempt that this writer does not hold."""
        attempt = data.draw(st.integers(1, self.next_attempt))
        self.receiver.on_drained(writer, WritesDrained("r", attempt, writer.epoch + 1, EPOCH))
        self.receiver.on_drained(writer, WritesDrained("r", attempt, writer.epoch, EPOCH + 1))
        if self.may_write.get(("r", attempt)) != Writer(writer.worker_id, writer.epoch):
            self.receiver.on_drained(writer, WritesDrained("r", attempt, writer.epoch, EPOCH))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.open))
        self.open.remove(key)
        assert self.receiver.abandon(key) == (key in self.may_write)
        self.ended[key] = "abandoned" if key in self.may_write else "forgotten"

    @rule(seconds=st.sampled_from([0.2, 1.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.receiver.tick()

    @rule(writer=st.sampled_from(WRITERS))
    def link_lost(self, writer: Peer) -> None:
        self.receiver.on_writer_lost(writer)

    @rule(writer=st.sampled_from(WRITERS))
    def link_up(self, writer: Peer) -> None:
        self.sent.clear()
        self.receiver.on_writer_up(writer)
        assert all(isinstance(message, CancelWrites) for _, message in self.sent)

    @rule(dead=st.sampled_from(WRITERS))
    def death(self, dead: Peer) -> None:
        gone = Writer(dead.worker_id, dead.epoch)
        self.may_write = {key: writer for key, writer in self.may_write.items() if writer != gone}
        self.broken.pop(gone, None)
        self.severing.discard(gone)
        living = {Writer(p.worker_id, p.epoch) for p in WRITERS if p != dead}
        self.receiver.on_living_writers(living)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        waiting = {key for key, how in self.ended.items() if how in ("stuck", "abandoned")}
        assert len(self.receiver) == len(self.open) + len(waiting)
        assert waiting == set(self.may_write) - set(self.open)
        assert self.expected == len(self.may_write), "the transport polls exactly while writes may come"


TestReceiver = ReceiverMachine.TestCase
TestReceiver.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_an_overdue_set_is_asked_for_twice_then_stopped_then_left_behind() -> None:
    machine = ReceiverMachine()
    machine.reserve()
    machine.receiver.on_announce(WRITERS[0], AnnounceWrites("r", 1, "prefill-0", 10, EPOCH, 1, KEYS))
    machine.receiver.on_write_done(Writer("prefill-0", 10), WriteDone("r", 1, 10, EPOCH, KEYS[0]))
    machine.sent.clear()
    kinds = []
    for _ in range(60):
        machine.now += 0.1
        machine.receiver.tick()
        kinds += [type(message) for _, message in machine.sent]
        machine.sent.clear()
    assert kinds == [MissingWrites, MissingWrites, CancelWrites, CancelWrites]
    assert machine.ended == {("r", 1): "stuck"}
    assert machine.receiver.state(("r", 1)) is ReceiveState.ABANDONED


def test_outbox_numbers_and_bounds() -> None:
    outbox = Outbox(epoch=5, max_unacknowledged=2)
    outputs = [TokenOutput("r", 1, 0, [1])]
    assert [outbox.batch(outputs).sequence_number for _ in range(2)] == [1, 2]
    with pytest.raises(OutboxFull, match="2 token batches"):
        outbox.batch(outputs)
    outbox.acknowledge(1)
    outbox.acknowledge(1)
    assert outbox.batch(outputs).sequence_number == 3
    assert outbox.unacknowledged == 2
    with pytest.raises(WireError, match="batch 4"):
        outbox.acknowledge(4)
