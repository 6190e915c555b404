"""The thread that owns a transport: outcomes come exactly once, whatever happens to write or thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from staged_ends import until
from transfer_ends import BUSY_POLL_S, Ends

from antiphon.kv_transfer import transfer_thread
from antiphon.kv_transfer.in_process import Fault
from antiphon.kv_transfer.transfer_thread import Fate, TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Transport
from antiphon.protocol.errors import TransferError


@pytest.fixture
def ends(buffer_type: Any, make_copies: Any) -> Iterator[Ends]:
    made = Ends(buffer_type, make_copies)
    yield made
    assert made.sender.stop(60)
    assert made.receiver.stop(60)


def test_write_and_notification(ends: Ends) -> None:
    ends.write(b"one")
    until(lambda: len(ends.outcomes) == 1 and ends.heard == [("sender", b"one")])
    assert ends.outcomes[0].error is None
    assert (ends.target.bytes == 9).all()
    ends.sender.notify(ends.peer, b"two", ends.outcomes.append)
    until(lambda: ends.heard[-1] == ("sender", b"two"))


def test_a_write_waits_for_its_source(ends: Ends) -> None:
    ready = threading.Event()
    ends.write(b"later", ready=ready.is_set)
    ends.write(b"now")
    until(lambda: ends.heard == [("sender", b"now")] and ends.outcomes)
    for _ in range(3):
        ends.sender.run(lambda transport: None).result(60)
    assert len(ends.outcomes) == 1
    ready.set()
    until(lambda: len(ends.outcomes) == 2)


def test_a_write_is_posted_before_the_next_one_is_planned(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bytes]] = []
    post, all_asked = ends.network.post, threading.Event()

    def noted(sender: str, receiver: str, copies: Any, notification: bytes) -> Any:
        done.append(("posted", notification))
        return post(sender, receiver, copies, notification)

    def plan(name: bytes) -> None:
        done.append(("planned", name))
        ends.write(name)

    monkeypatch.setattr(ends.network, "post", noted)
    ends.sender.run(lambda transport: all_asked.wait(60))
    for name in (b"1", b"2"):
        ends.sender.when(lambda: True, partial(plan, name), lambda error: None)
    all_asked.set()
    until(lambda: len(ends.outcomes) == 2)
    assert done == [(what, name) for name in (b"1", b"2") for what in ("planned", "posted")]


def test_one_failed_post_is_tried_again_and_two_are_a_failure(ends: Ends) -> None:
    ends.network.inject(Fault.FAIL_POST, 1)
    ends.write(b"a")
    until(lambda: len(ends.outcomes) == 1)
    assert ends.outcomes[0].error is None
    ends.network.inject(Fault.FAIL_POST, 2)
    ends.write(b"b")
    until(lambda: len(ends.outcomes) == 2)
    assert ends.outcomes[1].error is not None
    assert ends.outcomes[1].error.stage == "post"
    assert [outcome.fate for outcome in ends.outcomes] == [Fate.LANDED, Fate.NOT_SENT]


def test_a_post_that_broke_the_connection_is_not_tried_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one could say that nothing was posted, and of the first one some may arrive."""
    errors = [TransferError("connection", "remote disconnect"), TransferError("post", "no such peer")]

    def post(*write: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(ends.network, "post", post)
    ends.write(b"")
    until(lambda: len(ends.outcomes) == 1)
    (outcome,) = ends.outcomes
    assert outcome.error is not None
    assert (outcome.error.stage, outcome.fate) == ("connection", Fate.UNKNOWN)


def test_a_hanging_write_ends_only_when_it_cannot_land_any_more(ends: Ends) -> None:
    ends.network.inject(Fault.HOLD)
    ends.sender._write_timeout_s = 0.2
    ends.write(b"held")
    until(lambda: any(record.error is not None for record in ends.sender._in_flight))
    assert ends.outcomes == []
    ends.network.release_held()
    until(lambda: len(ends.outcomes) == 1)
    error = ends.outcomes[0].error
    assert error is not None
    assert "no completion within 0.2 s" in str(error)
    assert ends.outcomes[0].fate is Fate.LANDED


def test_of_a_write_that_failed_nobody_knows_what_arrived(ends: Ends) -> None:
    ends.network.inject(Fault.FAIL_WRITE)
    ends.write(b"half")
    until(lambda: len(ends.outcomes) == 1)
    error = ends.outcomes[0].error
    assert error is not None
    assert (error.stage, ends.outcomes[0].fate) == ("connection", Fate.UNKNOWN)


def test_the_next_hand_of_a_transfer_is_taken_without_a_pause(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_thread, "HOT_S", 3600.0)
    pauses = pauses_of(ends.sender, monkeypatch)
    polled, done = iter(range(1000)), threading.Event()

    def next_hand(outcome: WriteOutcome) -> None:
        pauses.clear()
        ends.sender.when(lambda: next(polled) == 200, done.set, lambda error: None)

    ends.sender.write(ends.peer, ends.copies, b"", next_hand)
    assert done.wait(60)
    assert len(pauses) >= 200
    assert set(pauses) == {transfer_thread.HOT_POLL_S}


def test_a_write_that_takes_long_is_polled_now_and_then(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.network.inject(Fault.HOLD)
    ends.write(b"held")
    until(lambda: ends.network.held == 1)
    pauses, before = pauses_of(ends.sender, monkeypatch), ends.polls["sender"]
    until(lambda: pauses.count(BUSY_POLL_S) >= 4 and ends.polls["sender"] > before)
    assert set(pauses[pauses.index(BUSY_POLL_S) :]) == {BUSY_POLL_S}, "nothing happens any more"
    ends.network.release_held()


def pauses_of(thread: TransferThread, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the thread means to wait, turn by turn from now on."""
    found: list[float] = []
    pause = thread._pause_s

    def noted() -> float:
        found.append(pause())
        return found[-1]

    monkeypatch.setattr(thread, "_pause_s", noted)
    return found


def test_a_peer_is_disconnected_only_after_its_last_write(ends: Ends) -> None:
    ends.network.inject(Fault.HOLD)
    ends.write(b"held")
    until(lambda: ends.network.held == 1)
    ends.sender.disconnect(ends.peer)
    ends.write(b"still connected")
    until(lambda: ends.heard == [("sender", b"still connected")])
    ends.network.release_held()
    until(lambda: len(ends.outcomes) == 2)
    assert [outcome.error for outcome in ends.outcomes] == [None, None]
    ends.sender.run(lambda transport: None).result(60)
    ends.write(b"too late")
    until(lambda: len(ends.outcomes) == 3)
    assert "not connected" in str(ends.outcomes[2].error)


def test_a_dead_thread_leaves_nobody_waiting(ends: Ends) -> None:
    ends.write(b"waits", ready=lambda: False)
    ends.network.kill("sender")
    until(lambda: len(ends.failures) == 1)
    until(lambda: len(ends.outcomes) == 1)
    assert "the transfer thread died" in str(ends.outcomes[0].error)
    ends.write(b"late")
    assert len(ends.outcomes) == 2
    with pytest.raises(TransferError, match="the transfer thread died"):
        ends.sender.run(lambda transport: transport.metadata()).result(60)


def test_a_transport_that_cannot_be_opened_is_reported() -> None:
    failures: list[BaseException] = []

    def refuse() -> Transport:
        raise TransferError("handshake", "no such device")

    thread = TransferThread(refuse, lambda sender, payload: None, failures.append, write_timeout_s=1)
    future = thread.run(lambda transport: transport.metadata())
    thread.start()
    with pytest.raises(TransferError, match="no such device"):
        future.result(60)
    assert thread.stop(60)
    assert [str(failure) for failure in failures] == ["handshake: no such device"]


def test_what_fails_before_the_transport_is_opened_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []

    def refuse() -> None:
        raise OSError("no such library")

    def never() -> Transport:
        raise AssertionError("the thread had failed before")

    monkeypatch.setattr(transfer_thread, "_fine_timers", refuse)
    thread = TransferThread(never, lambda sender, payload: None, failures.append, write_timeout_s=1)
    future = thread.run(lambda transport: transport.metadata())
    thread.start()
    with pytest.raises(TransferError, match="no such library"):
        future.result(60)
    assert thread.stop(60)
    assert [str(failure) for failure in failures] == ["no such library"]
