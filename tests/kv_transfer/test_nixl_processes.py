"""NIXL between two real processes: bytes, notifications, a peer that dies and comes back."""

from __future__ import annotations

import json
import select
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

    def __init__(self, name: str) -> None:
        script = Path(__file__).parent / "nixl_receiver.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def _fails(action: Callable[[], Any]) -> bool:
    """Whether a write to a dead peer is refused or reported as failed; it must not hang."""
    try:
        return action() is WriteState.FAILED
    except TransferError:
        return True
