"""Two threads with a transport each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.transfer_thread import Fate, TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Transport
from antiphon.protocol.errors import TransferError

BUSY_POLL_S = 0.05


class Counted:
    """A transport that counts how often it is polled."""

    def __init__(self, transport: Transport, polls: Counter[str], name: str) -> None:
        self._transport, self._polls, self._name = transport, polls, name

    def notifications(self) -> Any:
        self._polls[self._name] += 1
        return self._transport.notifications()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Rest(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        assert self.goes_on.wait(60)
        return super().wait(timeout)


def at_rest(thread: TransferThread) -> threading.Event:
    """Hold a thread where it has nothing to do, until the event is set."""
    rest, before = _Rest(), thread._wake
    thread._wake = rest
    before.set()
    assert rest.reached.wait(60)
    return rest.goes_on


class Ends:
    """A sending thread and a receiving thread over one network."""

    def __init__(self, buffer_type: Any, make_copies: Any) -> None:
        self.network = InProcessNetwork()
        self.source, self.target = buffer_type(256, fill=9), buffer_type(256)
        self.heard: list[tuple[str, bytes]] = []
        self.failures: list[BaseException] = []
        self.polls: Counter[str] = Counter()
        self.outcomes: list[WriteOutcome] = []
        self.sender = self._thread("sender", self.source)
        self.receiver = self._thread("receiver", self.target)
        metadata = self.receiver.run(lambda transport: transport.metadata()).result(60)
        self.peer = self.sender.run(lambda transport: transport.connect(metadata)).result(60)
        self.copies = make_copies(self.source.memory, self.target.memory, (0, 0, 256))

    def _thread(self, name: str, buffer: Any) -> TransferThread:
        def open_transport() -> Transport:
            transport = Counted(self.network.transport(name), self.polls, name)
            transport.register([buffer.memory])
            return transport  # type: ignore[no-any-return]

        thread = TransferThread(
            open_transport,
            lambda sender, payload: self.heard.append((sender, payload)),
            self.failures.append,
            write_timeout_s=120.0,
            busy_poll_s=BUSY_POLL_S,
        )
        thread.start()
        return thread

    def write(self, notification: bytes, ready: Callable[[], bool] | None = None) -> None:
        def post() -> None:
            self.sender.write(self.peer, self.copies, notification, self.outcomes.append)

        if ready is None:
            post()
        else:
            self.sender.when(ready, post, self.abandoned)

    def abandoned(self, error: TransferError) -> None:
        self.outcomes.append(WriteOutcome(error, 0.0, Fate.NOT_SENT))
