"""NIXL between two real processes: bytes, notifications, a peer that dies and comes back."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Copies, Memory, WriteState
from antiphon.protocol.errors import TransferError

SIZE = 4 * 1024 * 1024


class Receiver:
    """A receiving process; see nixl_receiver.py."""

    def __init__(self, name: str, environment: dict[str, str] | None = None) -> None:
        script = Path(__file__).parent / "nixl_receiver.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        while not (hello := self.hear()).get("metadata"):
            pass
        self.metadata = bytes.fromhex(hello["metadata"])
        self.memory = Memory(hello["address"], SIZE)

    def hear(self) -> dict[str, Any]:
        """What it says next; NIXL's own lines are skipped."""
        assert self.process.stdout is not None
        while True:
            assert select.select([self.process.stdout], [], [], 30)[0], "the receiver is silent"
            line = self.process.stdout.readline()
            assert line, "the receiver ended"
            if line.startswith("{"):
                return dict(json.loads(line))

    def tell(self, command: str, *, wait: bool = True) -> dict[str, Any]:
        """Give a command of ``nixl_receiver.obey``; its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        while wait:
            answer = self.hear()
            if "obeyed" in answer:
                return answer
        return {}

    def end(self, kill: bool = False) -> None:
        """Let it close, or kill it."""
        if kill:
            self.process.kill()
        _, _ = self.process.communicate(timeout=20)


def write(transport: NixlTransport, peer: str, copies: Copies, notification: bytes) -> WriteState:
    """Post and poll to the end."""
    name = transport.post_write(peer, [copies], notification)
    deadline = time.monotonic() + 20
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

    first.end(kill=True)
    assert _fails(lambda: write(sender, peer, whole, b"to the dead"))
    sender.disconnect(peer)

    second = Receiver("receiver/2/0")  # a new life has a new agent name
    peer = sender.connect(second.metadata)
    again = Copies(local, second.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    assert write(sender, peer, again, b"again") is WriteState.DONE
    assert second.hear() == {"sender": "sender/1/0", "payload": "again", "total": 3 * SIZE}
    second.end()


def test_a_write_is_not_over_before_it_has_ended(request: pytest.FixtureRequest) -> None:
    """Over TCP the bytes of a write that was given up arrive as soon as the receiver reads again."""
    source = np.full(SIZE, 7, dtype=np.uint8)
    sender = NixlTransport("sender/2/0")
    request.addfinalizer(sender.close)
    local = Memory(source.ctypes.data, SIZE)
    sender.register([local])
    receiver = Receiver("receiver/3/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(lambda: receiver.end(kill=True))
    peer = sender.connect(receiver.metadata)
    first = Copies(local, receiver.memory, np.array([[0, 0, 4096]], dtype=np.int64))
    assert write(sender, peer, first, b"connected") is WriteState.DONE
    assert receiver.hear()["total"] == 7 * 4096

    receiver.process.send_signal(signal.SIGSTOP)
    whole = Copies(local, receiver.memory, np.array([[0, 0, SIZE]], dtype=np.int64))
    name = sender.post_write(peer, [whole], b"late")
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert sender.state(name) is WriteState.IN_PROGRESS
        time.sleep(0.01)
    assert not sender.release(name)
    receiver.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while sender.state(name) is WriteState.IN_PROGRESS:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert receiver.hear()["total"] == 7 * SIZE
    assert sender.release(name)


class Sender:
    """A sending process; see nixl_sender.py."""

    def __init__(self, name: str, receiver: Receiver) -> None:
        script = Path(__file__).parent / "nixl_sender.py"
        arguments = [name, str(SIZE), receiver.metadata.hex(), str(receiver.memory.address)]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": "tcp,self"},
        )

    def wait_for(self, line: str) -> None:
        """Until it says so."""
        assert self.process.stdout is not None
        while self.process.stdout.readline().strip() != line:
            assert self.process.poll() is None

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("severed", [False, True], ids=["as it is", "severed"])
def test_what_a_dead_writer_left_in_the_network_lands_unless_its_connections_are_severed(
    severed: bool, request: pytest.FixtureRequest
) -> None:
    receiver = Receiver("receiver/4/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(lambda: receiver.end(kill=True))
    bystander, sender = Sender("sender/4/0", receiver), None
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

    assert sender.process.stdin is not None
    receiver.tell("pause 1.5", wait=False)
    sender.process.stdin.write("go\n")
    sender.process.stdin.flush()
    sender.wait_for("posted")
    sender.end()  # while the receiver does not look
    if severed:
        receiver.tell("sever sender", wait=False)
    assert receiver.hear()["obeyed"] == "pause"
    first = receiver.hear() if severed else receiver.tell("pause 0")
    time.sleep(0.5)
    last = receiver.tell("pause 0")
    if severed:
        assert last["total"] == first["total"]  # nothing lands once they are severed
    else:
        assert last["total"] > 7 * 4096  # it does land after the writer's death: the test tests something

    assert bystander.process.stdin is not None
    bystander.process.stdin.write("go\n")  # somebody else's connection still works
    bystander.process.stdin.flush()
    assert receiver.hear() == {"sender": "sender/4/0", "payload": "arrived", "total": 7 * SIZE}


def test_a_severed_writer_that_lives_connects_anew(request: pytest.FixtureRequest) -> None:
    source = np.full(SIZE, 5, dtype=np.uint8)
    sender = NixlTransport("sender/6/0")
    request.addfinalizer(sender.close)
    local = Memory(source.ctypes.data, SIZE)
    sender.register([local])
    receiver = Receiver("receiver/5/0", {"UCX_TLS": "tcp,self"})
    request.addfinalizer(lambda: receiver.end(kill=True))
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
