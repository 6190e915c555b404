"""NIXL between two real processes: bytes, notifications, a peer that dies and comes back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from talking_process import TalkingProcess

from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Copies, Memory, WriteState
from antiphon.protocol.errors import TransferError

SIZE = 4 * 1024 * 1024


class Receiver(TalkingProcess):
    """A receiving process; see nixl_receiver.py."""

    def __init__(self, name: str, environment: dict[str, str] | None = None) -> None:
        super().__init__("nixl_receiver.py", name, str(SIZE), environment=environment)
        while not (hello := self.hear()).get("metadata"):
            pass
        self.metadata = bytes.fromhex(hello["metadata"])
        self.memory = Memory(hello["address"], SIZE)

    def hear(self) -> dict[str, Any]:
        """What it says next; NIXL's own lines are skipped."""
        while not (line := self.hear_line()).startswith("{"):
            pass
        return dict(json.loads(line))

    def tell(self, command: str) -> dict[str, Any]:
        """Give a command of ``nixl_receiver.obey``; its answer."""
        self.say(command)
        while "obeyed" not in (answer := self.hear()):
            pass
        return answer


def write(transport: NixlTransport, peer: str, copies: Copies, notification: bytes) -> WriteState:
    """Post and poll to the end."""
    name = transport.post_write(peer, [copies], notification)
    deadline = time.monotonic() + 60
    while (state := transport.state(name)) is WriteState.IN_PROGRESS:
        assert time.monotonic() < deadline
    assert transport.release(name)
    return state


def test_write_die_restart(request: pytest.FixtureRequest) -> None:
    source = np.arange(SIZE, dtype=np.uint8)
    sender = NixlTransport("sender/1/0")
    request.addfinalizer(sender.close)
    local = Memory(source.ctypes.data, SIZE)
    sender.register([local])

    first = Receiver("receiver/1/0")
    peer = sender.connect(first.metadata)
    assert peer == "receiver/1/0"
    whole = Copies(local, first.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    assert write(sender, peer, whole, b"whole") is WriteState.DONE
    total = int(source.astype(np.int64).sum())
    assert first.hear() == {"sender": "sender/1/0", "payload": "whole", "total": total}
    first.tell("claim sender")
    assert first.tell("received sender")["bytes"] < SIZE / 2  # by shared memory

    source[:] = 3
    rows = np.array([[i * 4096, i * 8192, 4096] for i in range(256)], dtype=np.int64)
    assert write(sender, peer, Copies(local, first.memory, rows), b"runs") is WriteState.DONE
    seen = first.hear()
    expected = np.arange(SIZE, dtype=np.uint8)
    for _, to, length in rows.tolist():
        expected[to : to + length] = 3
    assert (seen["payload"], seen["total"]) == ("runs", int(expected.astype(np.int64).sum()))

    first.end()
    assert _fails(lambda: write(sender, peer, whole, b"to the dead"))
    sender.disconnect(peer)

    second = Receiver("receiver/2/0")  # a new life has a new agent name
    peer = sender.connect(second.metadata)
    again = Copies(local, second.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    assert write(sender, peer, again, b"again") is WriteState.DONE
    assert second.hear() == {"sender": "sender/1/0", "payload": "again", "total": 3 * SIZE}
    second.end(kill=False)


def test_a_write_is_not_over_before_it_has_ended(request: pytest.FixtureRequest) -> None:
    """Over TCP the bytes of a write that was given up arrive as soon as the receiver reads again."""
    source = np.full(SIZE, 7, dtype=np.uint8)
    sender = NixlTransport("sender/2/0")
    request.addfinalizer(sender.close)
    local = Memory(source.ctypes.data, SIZE)
    sender.register([local])
    receiver = Receiver("receiver/3/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(receiver.end)
    peer = sender.connect(receiver.metadata)
    first = Copies(local, receiver.memory, np.array([[0, 0, 4096]], dtype=np.int64))
    assert write(sender, peer, first, b"connected") is WriteState.DONE
    assert receiver.hear()["total"] == 7 * 4096

    receiver.process.send_signal(signal.SIGSTOP)
    receiver.wait_stopped()
    whole = Copies(local, receiver.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    name = sender.post_write(peer, [whole], b"late")
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert sender.state(name) is WriteState.IN_PROGRESS
        time.sleep(0.01)
    assert not sender.release(name)
    receiver.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    while sender.state(name) is WriteState.IN_PROGRESS:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert receiver.hear()["total"] == 7 * SIZE
    assert sender.release(name)


class Sender(TalkingProcess):
    """A sending process; see nixl_sender.py."""

    def __init__(self, name: str, receiver: Receiver) -> None:
        where = receiver.metadata.hex(), str(receiver.memory.address)
        super().__init__("nixl_sender.py", name, str(SIZE), *where, environment={"UCX_TLS": "tcp,self"})

    def wait_for(self, line: str) -> None:
        """Until it says so."""
        while self.hear_line() != line:
            pass


@pytest.mark.parametrize("severed", [False, True], ids=["as it is", "severed"])
def test_what_a_dead_writer_left_in_the_network_lands_unless_its_connections_are_severed(
    severed: bool, request: pytest.FixtureRequest
) -> None:
    receiver = Receiver("receiver/4/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(receiver.end)
    bystander = Sender("sender/4/0", receiver)
    request.addfinalizer(bystander.end)
    bystander.wait_for("connected")
    assert receiver.hear()["payload"] == "arrived"
    receiver.tell("claim bystander")
    sender = Sender("sender/5/0", receiver)
    request.addfinalizer(sender.end)
    sender.wait_for("connected")
    assert receiver.hear()["total"] == 7 * 4096
    receiver.tell("claim sender")
    assert receiver.tell("received sender")["bytes"] > 4096  # the kernel's account shows what UCX chose

    receiver.say("pause")
    assert receiver.hear() == {"pausing": True}
    sender.say("go")
    sender.wait_for("posted")
    sender.end()  # while the receiver does not look
    if severed:
        first = receiver.tell("sever sender")
        time.sleep(0.5)
        assert receiver.tell("look")["total"] == first["total"]  # nothing lands once they are severed
    else:
        deadline = time.monotonic() + 60
        while receiver.tell("look")["total"] == 7 * 4096:  # it does land: the test tests something
            assert time.monotonic() < deadline
            time.sleep(0.01)

    bystander.say("go")  # somebody else's connection still works
    while (heard := receiver.hear()).get("sender") != "sender/4/0":
        assert heard["sender"] == "sender/5/0"
        assert not severed, "its last word came through a connection that is closed"
    assert heard == {"sender": "sender/4/0", "payload": "arrived", "total": 7 * SIZE}


def test_a_severed_writer_that_lives_connects_anew(request: pytest.FixtureRequest) -> None:
    source = np.full(SIZE, 5, dtype=np.uint8)
    sender = NixlTransport("sender/6/0")
    request.addfinalizer(sender.close)
    local = Memory(source.ctypes.data, SIZE)
    sender.register([local])
    receiver = Receiver("receiver/5/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(receiver.end)
    peer = sender.connect(receiver.metadata)
    small = Copies(local, receiver.memory, np.array([[0, 0, 4096]], dtype=np.int64))
    whole = Copies(local, receiver.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    assert write(sender, peer, small, b"before") is WriteState.DONE
    assert receiver.hear()["payload"] == "before"
    receiver.tell("claim sender")
    receiver.tell("sever sender")
    assert _fails(lambda: write(sender, peer, small, b"broken"))
    with pytest.raises(TransferError, match="connection: "):
        sender.post_write(peer, [small], b"broken as well")
    assert sender.connect(receiver.metadata) == peer
    assert write(sender, peer, whole, b"after") is WriteState.DONE
    assert receiver.hear() == {"sender": "sender/6/0", "payload": "after", "total": 5 * SIZE}


def _fails(action: Callable[[], Any]) -> bool:
    """Whether a write to a dead peer is refused or reported as failed; it must not hang."""
    try:
        return action() is WriteState.FAILED
    except TransferError:
        return True
