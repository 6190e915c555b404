"""What a caller posts itself while the thread of its transport rests, and when it must not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from staged_ends import until
from transfer_ends import Counted, Ends, at_rest

from antiphon.kv_transfer.in_process import Fault
from antiphon.kv_transfer.transfer_thread import Fate


@pytest.fixture
def ends(buffer_type: Any, make_copies: Any) -> Iterator[Ends]:
    made = Ends(buffer_type, make_copies)
    yield made
    assert made.sender.stop(60)
    assert made.receiver.stop(60)


def write_at_once(ends: Ends, name: bytes, ready: Callable[[], bool] = lambda: True) -> None:
    post = partial(ends.write, name)
    ends.sender.when(ready, post, ends.abandoned, at_once=True)


@pytest.fixture
def posted(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """(notification, thread) of each write that was posted."""
    found: list[tuple[bytes, int]] = []
    post = ends.network.post

    def noted(sender: str, receiver: str, copies: Any, notification: bytes) -> Any:
        found.append((notification, threading.get_ident()))
        return post(sender, receiver, copies, notification)

    monkeypatch.setattr(ends.network, "post", noted)
    return found


def own_thread(ends: Ends) -> int:
    return ends.sender.run(lambda transport: threading.get_ident()).result(60)


def test_what_is_to_run_at_once_is_posted_by_its_caller(
    ends: Ends, posted: list[tuple[bytes, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends.sender, "_pause_s", lambda: 3600.0)
    goes_on = at_rest(ends.sender)
    write_at_once(ends, b"1")
    assert posted == [(b"1", threading.get_ident())]
    goes_on.set()  # to sleep, unless it was woken
    until(lambda: len(ends.outcomes) == 1 and ends.heard == [("sender", b"1")])
    assert ends.outcomes[0].error is None


def test_nothing_is_posted_before_what_was_asked_for_earlier(
    ends: Ends, posted: list[tuple[bytes, int]]
) -> None:
    thread, goes_on, at_work = own_thread(ends), threading.Event(), threading.Event()
    ends.sender.run(lambda transport: (at_work.set(), goes_on.wait(60)))
    assert at_work.wait(60)
    ends.write(b"1")
    write_at_once(ends, b"2")
    goes_on.set()
    until(lambda: len(ends.outcomes) == 2)
    assert posted == [(b"1", thread), (b"2", thread)]


def test_what_was_asked_for_and_not_begun_comes_first_as_well(
    ends: Ends, posted: list[tuple[bytes, int]]
) -> None:
    thread, goes_on = own_thread(ends), at_rest(ends.sender)
    ends.write(b"1")
    write_at_once(ends, b"2")
    assert not posted
    goes_on.set()
    until(lambda: len(ends.outcomes) == 2)
    assert posted == [(b"1", thread), (b"2", thread)]


def test_a_caller_that_has_posted_at_once_posts_nothing_else(
    ends: Ends, posted: list[tuple[bytes, int]]
) -> None:
    thread, goes_on = own_thread(ends), at_rest(ends.sender)
    write_at_once(ends, b"1")
    ends.write(b"2")
    assert posted == [(b"1", threading.get_ident())]
    goes_on.set()
    until(lambda: len(ends.outcomes) == 2)
    assert posted[1:] == [(b"2", thread)]


def test_nothing_is_posted_once_the_thread_is_to_die(ends: Ends, posted: list[tuple[bytes, int]]) -> None:
    goes_on = at_rest(ends.sender)
    ends.sender.when(lambda: 1 / 0 > 0, lambda: None, ends.abandoned, at_once=True)
    write_at_once(ends, b"late")
    assert len(ends.outcomes) == 1
    goes_on.set()
    until(lambda: len(ends.outcomes) == 2)
    assert "the transfer thread died: ZeroDivisionError" in str(ends.outcomes[1].error)
    assert not posted


def test_what_is_not_ready_at_once_is_posted_when_it_is(ends: Ends, posted: list[tuple[bytes, int]]) -> None:
    ready = threading.Event()
    write_at_once(ends, b"later", ready.is_set)
    thread = own_thread(ends)
    assert not posted
    ready.set()
    until(lambda: len(ends.outcomes) == 1)
    assert posted == [(b"later", thread)]


def test_an_outcome_at_once_comes_once(ends: Ends) -> None:
    """Refused twice, on whichever thread."""
    ends.network.inject(Fault.FAIL_POST, 2)
    write_at_once(ends, b"refused")
    until(lambda: len(ends.outcomes) == 1)
    own_thread(ends)
    assert [outcome.fate for outcome in ends.outcomes] == [Fate.NOT_SENT]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("when", ["ready", "act"])
def test_nobody_waits_for_what_the_thread_died_of(ends: Ends, when: str, at_once: bool) -> None:
    def fail() -> bool:
        raise OSError("no such device")

    ready = fail if when == "ready" else lambda: True
    ends.sender.when(ready, fail, ends.abandoned, at_once=at_once)
    until(lambda: len(ends.failures) == 1)
    assert str(ends.failures[0]) == "no such device"
    write_at_once(ends, b"late")
    assert len(ends.outcomes) == 2
    for outcome in ends.outcomes:
        assert "the transfer thread died: OSError('no such device')" in str(outcome.error)


@pytest.mark.parametrize("when", ["posting", "posted"])
def test_what_may_be_under_way_is_not_called_over(
    ends: Ends, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would be given to others while they are still written."""

    def fail(*arguments: Any) -> None:
        raise OSError("no such device")

    def act() -> None:
        ends.write(b"held")
        fail()

    if when == "posting":
        monkeypatch.setattr(ends.network, "post", fail)
    ends.network.inject(Fault.HOLD)
    ends.sender.when(lambda: True, act, ends.abandoned, at_once=True)
    until(lambda: len(ends.failures) == 1)
    assert not ends.outcomes


def test_a_transport_that_is_closed_is_left_alone(ends: Ends, posted: list[tuple[bytes, int]]) -> None:
    assert ends.sender.stop(60)
    write_at_once(ends, b"late")
    write_at_once(ends, b"never", lambda: False)
    assert ["was stopped" in str(outcome.error) for outcome in ends.outcomes] == [True, True]
    assert not posted


def test_a_transport_is_used_by_one_thread_at_a_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, clashes, post = threading.Lock(), [], ends.network.post

    def exclusive(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any) -> Any:
            if not inside.acquire(blocking=False):
                clashes.append(threading.get_ident())
                return call(*arguments)
            try:
                time.sleep(0)  # lets another thread have its turn
                return call(*arguments)
            finally:
                inside.release()

        return calling

    monkeypatch.setattr(ends.network, "post", exclusive(post))
    monkeypatch.setattr(Counted, "notifications", exclusive(Counted.notifications), raising=True)
    monkeypatch.setattr(ends.receiver, "_turn", lambda transport: time.sleep(0.01))
    own_thread(ends)

    def ask() -> None:
        for number in range(100):
            write_at_once(ends, b"%d" % number)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    until(lambda: len(ends.outcomes) == 400)
    assert not clashes
    assert not any(outcome.error for outcome in ends.outcomes)
