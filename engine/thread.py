"""The thread that steps an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from antiphon.engine.events import EngineEvent
from antiphon.engine.loop import EngineLoop

_log = logging.getLogger(__name__)
_WAIT_S = 0.1


class EngineThread:
    """Steps an engine whenever it has work, and hands each step's events over.

    Args:
        on_events: called on the engine thread after every step that had events; must only hand over.
        on_failure: called once if a step raises; the engine is not stepped again.
    """

    def __init__(
        self,
        engine: EngineLoop,
        on_events: Callable[[list[EngineEvent]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End after the current step; False when it did not end in time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._engine.wait_for_work(_WAIT_S):
                    events = self._engine.step()
                    if events:
                        self._on_events(events)
        except BaseException as error:
            _log.exception("the engine thread died")
            self._on_failure(error)
