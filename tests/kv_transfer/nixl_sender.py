"""A process that writes into another one's memory and then does nothing more. Run by tests, which kill it.

Usage: nixl_sender.py AGENT_NAME SIZE METADATA ADDRESS; says when a small write has arrived and, after a line
on stdin, when a large one is posted.
"""

from __future__ import annotations

import sys
import time

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

    def post(length: int) -> None:
        write = transport.post_write(
            peer, [Copies(local, remote, np.array([[0, 0, length]], dtype=np.int64))], b"arrived"
        )
        deadline = time.monotonic() + (20 if length < size else 0.3)
        while transport.state(write) is WriteState.IN_PROGRESS and time.monotonic() < deadline:
            time.sleep(0.001)

    post(4096)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    sys.stdin.readline()
    post(size)
    sys.stdout.write("posted\n")
    sys.stdout.flush()
    time.sleep(60)


if __name__ == "__main__":
    main()
