"""Calls into a thread that ends meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from antiphon.protocol import link_thread
from antiphon.protocol.link_thread import LinkThread


def test_a_call_that_comes_as_the_thread_stops_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_thread, "LIVENESS_POLL_S", 0.01)
    thread = LinkThread("links-test", lambda error: None)
    thread.start()
    stopping, asked = threading.Event(), threading.Event()

    def stop_and_linger() -> None:
        thread._loop.stop()  # ends the loop after this turn
        stopping.set()
        assert asked.wait(60)

    thread.post(stop_and_linger)
    assert stopping.wait(60)
    hand_over = thread._loop.call_soon_threadsafe

    def hand_over_and_end(*call: Any) -> None:
        hand_over(*call)
        asked.set()  # the turn under way is the last one, and this call came too late for it

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", hand_over_and_end)
    with pytest.raises(RuntimeError, match="stopped before"):
        thread.call(lambda: None)
    thread.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        thread.call(lambda: None)
