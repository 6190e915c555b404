"""A thread with an asyncio loop of its own, where a worker keeps its links and its state machines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIVENESS_POLL_S = 0.5
"""How often a call that waits looks whether the thread still runs."""


class LinkThread:
    """Runs callables on its loop; state that only they touch needs no lock.

    Args:
        on_failure: called on the loop with every exception that a posted callable or a link callback raised.
    """

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and its loop."""
        self._running_loop = asyncio.new_event_loop()
        self._running_loop.set_exception_handler(self._unhandled)
        self._thread.start()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._running_loop is None:
            raise RuntimeError("the thread was not started")
        return self._running_loop

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on the loop and return its result; not from the loop itself, and only while it runs.

        Raises:
            RuntimeError: the thread does not run, or was stopped before it came to this.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the thread does not run")
        if threading.current_thread() is self._thread:
            raise RuntimeError("call would wait for its own thread")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        while not wait([future], LIVENESS_POLL_S).done:
            if not self._thread.is_alive() and not future.done():
                raise RuntimeError("the thread was stopped before it came to this call")
        return future.result()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run on the loop soon, in the order of posting. After ``stop`` nothing runs any more."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def later(self, delay_s: float, function: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Run on the loop after a delay; from the loop only."""
        return self._loop.call_later(delay_s, function, *args)

    def when_done(self, future: Future[T], then: Callable[[Future[T]], None]) -> None:
        """Run ``then`` on the loop once the future has a result or an exception."""
        future.add_done_callback(lambda done: self.post(then, done))

    def stop(self) -> None:
        """Stop the loop and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if self._running_loop is not None and not self._running_loop.is_closed():
            self._running_loop.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._on_failure(error)
