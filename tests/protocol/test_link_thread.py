"""Calls into a thread that ends meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from antiphon.protocol.link_thread import LinkThread


def test_a_call_that_comes_as_the_thread_stops_does_not_wait_for_ever() -> None:
    thread = LinkThread("links-test", lambda error: None)
    thread.start()
    stopping, asked = threading.Event(), threading.Event()

    def stop_and_linger() -> None:
        thread._loop.stop()  # ends the loop after this turn
        stopping.set()
        asked.wait(10)
        time.sleep(0.05)

    thread.post(stop_and_linger)
    assert stopping.wait(10)
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(RuntimeError, match="stopped before"):
        thread.call(lambda: None)
    thread.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        thread.call(lambda: None)
