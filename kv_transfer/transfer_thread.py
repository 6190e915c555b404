"""The thread that owns a transport: posts writes, polls them, takes notifications.

How often it polls: every ``busy_poll_s`` while a write is under way or somebody expects one (``expecting``),
else every ``idle_poll_s``; and for a moment after anything has happened every ``HOT_POLL_S``, since the next
hand of the same transfer is due then. Sleeping between polls leaves the cores to the model on a small
machine.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from antiphon.kv_transfer.transport import Copies, DeviceEvent, Transport, WriteId, WriteState
from antiphon.protocol.errors import TransferError

_log = logging.getLogger(__name__)
T = TypeVar("T")

HOT_POLL_S = 0.00001
"""A copy between pages and slots takes some 30 us, a write of 32 MiB over NVLink 120 us."""
HOT_S = 0.0005
"""How long polls stay hot after the last event: longer than any hand takes on one host."""
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


class Fate(Enum):
    """What is known of a write's bytes once it has ended."""

    LANDED = "all of them are at the destination, and notified; perhaps later than they should"
    NOT_SENT = "nothing was posted"
    UNKNOWN = "some may be there, and what the network holds may follow until the connection is severed"


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """How a write ended. ``error`` is None when every byte is at the destination and notified in time."""

    error: TransferError | None
    seconds: float
    fate: Fate


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do with the transport, and what to do instead when there is none any more."""

    run: Callable[[Transport], None]
    abandon: Callable[[TransferError], None]


@dataclass(slots=True)
class _InFlight:
    peer: str
    write: WriteId
    began_at: float
    """When it was posted, or when its source was seen ready."""
    on_done: Callable[[WriteOutcome], None]
    after: DeviceEvent | None
    """What its source still waits for."""
    error: TransferError | None = None
    """Set when it must not complete any more but could not be released yet."""
    ended: bool = False


class TransferThread:
    """Runs a transport. Callbacks must only hand over.

    They are called on this thread, or on the one that runs something at once (``when``); never two at a time.

    Args:
        open_transport: makes the transport; called on the thread, which some insist on.
        on_notification: called with (sender's agent name, payload).
        on_failure: called once if the thread dies of an unexpected error.
        write_timeout_s: a longer write is given up; its outcome comes once it cannot land any more.
    """

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        on_notification: Callable[[str, bytes], None],
        on_failure: Callable[[BaseException], None],
        *,
        write_timeout_s: float,
        busy_poll_s: float = 0.0003,
        idle_poll_s: float = 0.01,
    ) -> None:
        self._open_transport = open_transport
        self._on_notification = on_notification
        self._on_failure = on_failure
        self._write_timeout_s = write_timeout_s
        self._busy_poll_s = busy_poll_s
        self._idle_poll_s = idle_poll_s
        self._commands: deque[_Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._expecting = 0
        self._stirred_at = 0.0
        """When anything last happened, by ``time.monotonic``."""
        self._in_flight: list[_InFlight] = []
        self._not_ready: list[_Command] = []
        self._over: TransferError | None = None
        self._lock = threading.Lock()  # guards commands against the moment at which the thread ends
        self._at_work = threading.Lock()  # held by who uses the transport, which one thread may at a time
        self._transport: Transport | None = None
        """None before it was opened, and once it is closed."""
        self._posting: int | None = None
        """The thread on which something runs at once."""
        self._given = 0
        """Writes that the transport was given, whatever became of them."""
        self._failure: BaseException | None = None
        """Of what was run on another thread."""
        self._thread = threading.Thread(target=self._main, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Open the transport and begin."""
        self._thread.start()

    def run(self, command: Callable[[Transport], T]) -> Future[T]:
        """Run something that needs the transport; its result or exception is the future's.

        A TransferError of stage ``transfer`` when the thread has ended or died.
        """
        future: Future[T] = Future()

        def execute(transport: Transport) -> None:
            try:
                future.set_result(command(transport))
            except Exception as error:
                future.set_exception(error)

        self._enqueue(_Command(execute, future.set_exception))
        return future

    def write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        on_done: Callable[[WriteOutcome], None],
        after: DeviceEvent | None = None,
    ) -> None:
        """Post a write; a refused one is tried once more.

        ``on_done`` is called exactly once, and not at all if the thread dies while it may be under way.
        From this thread, it is posted before anything that was asked for earlier, and at once by what
        ``when`` runs at once. ``after`` is as in ``Transport.post_write``; the write is timed from there.
        """

        def post(transport: Transport) -> None:
            start = time.monotonic()
            self._given += 1
            try:
                try:
                    write = transport.post_write(peer, copies, notification, after)
                except TransferError as error:
                    if error.stage != "post":
                        raise  # some of it may be under way, whatever another try would say
                    _log.warning("post to %s failed, trying once more: %s", peer, error)
                    write = transport.post_write(peer, copies, notification, after)
            except TransferError as error:
                fate = Fate.NOT_SENT if error.stage == "post" else Fate.UNKNOWN
                on_done(WriteOutcome(error, time.monotonic() - start, fate))
                return
            self._in_flight.append(_InFlight(peer, write, start, on_done, after))
            self._stirred_at = time.monotonic()

        if self._posting == threading.get_ident() and self._transport is not None:
            post(self._transport)
            return
        command = _Command(post, lambda error: on_done(WriteOutcome(error, 0.0, Fate.NOT_SENT)))
        self._enqueue(command, first=threading.current_thread() is self._thread)

    def when(
        self,
        ready: Callable[[], bool],
        act: Callable[[], None],
        abandon: Callable[[TransferError], None],
        *,
        at_once: bool = False,
    ) -> None:
        """Run ``act`` on this thread once ``ready()``, which is polled; ``abandon`` if it ends first.

        Also if it dies of one of the two, unless the transport was given a write by then: who is told that
        it is over may give away pages which that write still reads or changes.

        Args:
            at_once: run both on the caller's thread, if the transport is at rest and nothing was asked for
                before: waking a thread takes longer than beginning a copy. What ``act`` writes must be for
                peers that the transport maps, and it must not mind an outcome before ``write`` returns.
        """

        def act_when_ready(transport: Transport) -> None:
            given = self._given
            try:
                if not ready():
                    self._not_ready.append(command)
                    return
                self._stirred_at = time.monotonic()
                self._posting = threading.get_ident() if at_once else None
                act()
            except BaseException as error:
                if self._given == given:
                    with suppress(InvalidStateError):
                        abandon(_death(error))
                raise
            finally:
                self._posting = None

        command = _Command(act_when_ready, abandon)
        if not (at_once and self._ran_here(command)):
            self._enqueue(command)

    def soon(self, act: Callable[[], None]) -> None:
        """Run something on this thread whose outcome nobody waits for; an error in it ends the thread."""
        self._enqueue(_Command(lambda transport: act(), lambda error: None))

    def notify(
        self,
        peer: str,
        payload: bytes,
        on_done: Callable[[WriteOutcome], None],
        still: Callable[[], bool] | None = None,
    ) -> None:
        """Send a notification that belongs to no write.

        Args:
            still: whether to send it after all, asked when its turn has come; ``on_done`` is not called of
                one that is not sent.
        """

        def send(transport: Transport) -> None:
            if still is not None and not still():
                return
            error: TransferError | None = None
            try:
                transport.notify(peer, payload)
            except TransferError as failure:
                error = failure
            on_done(WriteOutcome(error, 0.0, Fate.LANDED if error is None else Fate.UNKNOWN))

        self._enqueue(_Command(send, lambda error: on_done(WriteOutcome(error, 0.0, Fate.NOT_SENT))))

    def disconnect(self, peer: str) -> None:
        """Forget a peer that is over, once no write to it is under way any more."""

        def disconnect_when_quiet(transport: Transport) -> None:
            if any(record.peer == peer for record in self._in_flight):
                self._not_ready.append(command)
            else:
                transport.disconnect(peer)

        command = _Command(disconnect_when_quiet, lambda error: None)  # closing disconnects as well
        self._enqueue(command)

    def expect(self, change: int) -> None:
        """Add to (or take from) the number of things whose notifications are being waited for."""
        self._expecting += change
        self._wake.set()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Close the transport and end; False when the thread did not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ran_here(self, command: _Command) -> bool:
        """Whether a command was run on the caller's thread, since the transport was at rest."""
        if not self._at_work.acquire(blocking=False):
            return False
        try:
            if self._commands or self._transport is None or self._failure is not None:
                return False
            command.run(self._transport)
        except BaseException as error:
            self._failure = error  # of which the thread dies, as if it had run there
            if not isinstance(error, Exception):  # meant for the caller's thread as well
                raise
        finally:
            self._at_work.release()
        self._wake.set()
        return True

    # --------------------------------------------------------------------------------------- on the thread

    def _enqueue(self, command: _Command, *, first: bool = False) -> None:
        with self._lock:
            over = self._over
            if over is None and first:
                self._commands.appendleft(command)
            elif over is None:
                self._commands.append(command)
        if over is not None:
            command.abandon(over)
        self._wake.set()

    def _main(self) -> None:
        try:
            _fine_timers()
            self._transport = transport = self._open_transport()
            try:
                while not self._stopping:
                    self._turn(transport)
            finally:
                with self._at_work:
                    self._transport = None
                    transport.close()
        except BaseException as error:
            _log.exception("the transfer thread died")
            self._abandon(_death(error))
            self._on_failure(error)
        else:
            self._abandon(TransferError("transfer", "the transfer thread was stopped"))

    def _abandon(self, error: TransferError) -> None:
        """Nobody may wait for ever for a thread that is gone."""
        with self._lock:
            self._over = error
            left = [*self._not_ready, *self._commands]
            self._commands.clear()
        for command in left:
            command.abandon(error)

    def _turn(self, transport: Transport) -> None:
        self._wake.clear()
        with self._at_work:
            if self._failure is not None:
                raise self._failure
            self._commands.extendleft(reversed(self._not_ready))
            self._not_ready.clear()
            while self._commands:
                self._commands.popleft().run(transport)
            for sender, payload in transport.notifications():
                self._stirred_at = time.monotonic()
                self._on_notification(sender, payload)
            for record in self._in_flight:
                self._poll(transport, record)
            self._in_flight = [record for record in self._in_flight if not record.ended]
        if not self._commands:
            self._wake.wait(self._pause_s())

    def _pause_s(self) -> float:
        """Until the next poll, unless something is asked for before."""
        if time.monotonic() - self._stirred_at < HOT_S:
            return min(HOT_POLL_S, self._busy_poll_s)
        busy = self._in_flight or self._not_ready or self._expecting > 0
        return self._busy_poll_s if busy else self._idle_poll_s

    def _poll(self, transport: Transport, record: _InFlight) -> None:
        if record.after is not None:
            if not record.after():
                return
            record.after = None
            record.began_at = self._stirred_at = time.monotonic()
        seconds = time.monotonic() - record.began_at
        state = transport.state(record.write)
        if state is WriteState.FAILED:  # also of one that was given up: its connection is broken
            record.error = TransferError("connection", "the transport reported a failed write")
        if state is WriteState.IN_PROGRESS:
            if seconds < self._write_timeout_s:
                return
            if record.error is None:
                record.error = TransferError("transfer", f"no completion within {self._write_timeout_s:g} s")
                _log.warning("giving up a write after %.1f s", seconds)
        if transport.release(record.write):
            record.ended = True
            self._stirred_at = time.monotonic()
            fate = Fate.LANDED if state is WriteState.DONE else Fate.UNKNOWN
            record.on_done(WriteOutcome(record.error, seconds, fate))


def _death(error: BaseException) -> TransferError:
    return TransferError("transfer", f"the transfer thread died: {error!r}")


def _fine_timers() -> None:
    """Let this thread's short waits end when they should: Linux adds 50 us to each otherwise."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # other systems have none, and are not where this has to be fast
        prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
