"""Signals that strike a process at the very moment at which one of its requests enters a state."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import Any


class Strikes:
    """One armed strike at a time; the tables of states that are watched."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._signal = 0

    def arm(self, state: str, signal: int) -> None:
        """Let ``signal`` strike when the next request enters ``state``, e.g. ``job granted``."""
        self._state, self._signal = state, signal

    def disarm(self) -> None:
        """Take it back."""
        self._state = None

    def watch_all(self, tables: dict[str, type[Any]]) -> None:
        """Watch several tables; a ``Sequence`` keeps its state as ``status``."""
        for name, holder in tables.items():
            self.watch(name, holder, "status" if name == "sequence" else "state")

    def watch(self, table: str, holder: type[Any], attribute: str) -> None:
        """Look at every state that objects of a class begin in or move to."""
        begin: Callable[..., None] = holder.__init__
        move: Callable[[Any, StrEnum], None] = holder.move

        def watched_begin(one: Any, *arguments: Any, **named: Any) -> None:
            begin(one, *arguments, **named)
            self._entered(f"{table} {getattr(one, attribute)}")

        def watched_move(one: Any, state: StrEnum) -> None:
            move(one, state)
            self._entered(f"{table} {state}")

        holder.__init__ = watched_begin  # type: ignore[misc]
        holder.move = watched_move

    def watch_call(self, moment: str, holder: type[Any], method: str) -> None:
        """Look at every call of a method, before it does anything."""
        call: Callable[..., Any] = getattr(holder, method)

        def watched_call(one: Any, *arguments: Any, **named: Any) -> Any:
            self._entered(moment)
            return call(one, *arguments, **named)

        setattr(holder, method, watched_call)

    def _entered(self, state: str) -> None:
        if state == self._state:
            self._state = None
            os.kill(os.getpid(), self._signal)


def prefill_tables() -> dict[str, type[Any]]:
    """The tables that a prefill worker keeps."""
    from antiphon.engine.sequence import Sequence
    from antiphon.prefill_worker.jobs import PrefillJob

    return {"job": PrefillJob, "sequence": Sequence}


def decode_tables() -> dict[str, type[Any]]:
    """The tables that a decode worker keeps."""
    from antiphon.decode_worker.receiver import _Receive
    from antiphon.engine.sequence import Sequence

    return {"receive": _Receive, "sequence": Sequence}


def router_tables() -> dict[str, type[Any]]:
    """The table that a router keeps."""
    from antiphon.router.dispatch.generation import Generation

    return {"request": Generation}
