"""A process that writes into another one's memory and then does nothing more. Run by tests, which kill it.

Usage: nixl_sender.py AGENT_NAME SIZE METADATA ADDRESS; says when a small write has arrived and, after a line
on stdin, when a large one is under way. Goes on with that until it is over or the process is killed.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np

from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Copies, Memory, WriteState


def main() -> None:
    name, size, metadata, address = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    source = np.full(size, 7, dtype=np.uint8)
    transport = NixlTransport(name)
    local = Memory(source.ctypes.data, size)
    transport.register([local])
    peer = transport.connect(bytes.fromhex(metadata))
    remote = Memory(address, size)

    def post(length: int) -> Callable[[], bool]:
        """Begin a write; whether it is over."""
        runs = np.array([[0, 0, length]], dtype=np.int64)
        write = transport.post_write(peer, [Copies(local, remote, runs)], b"arrived")
        return lambda: transport.state(write) is not WriteState.IN_PROGRESS

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def drive(over: Callable[[], bool], turns: int | None = None) -> None:
        for _ in itertools.count() if turns is None else range(turns):
            if over():
                return
            time.sleep(0.001)

    drive(post(4096))
    say("connected")
    sys.stdin.readline()
    large = post(size)
    drive(large, 300)  # as much of it as fits is on its way by then
    say("posted")
    drive(large)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
