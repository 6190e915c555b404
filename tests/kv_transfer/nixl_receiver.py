"""A process that registers memory, says where, and answers each notification with what it sees. Run by tests.

Usage: nixl_receiver.py AGENT_NAME SIZE. One JSON object a line on stdout; takes the commands of ``obey``, one
a line, and ends when stdin is closed.
"""

from __future__ import annotations

import json
import select
import sys
import time

import numpy as np

from antiphon.kv_transfer.arrivals import ARRIVALS
from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Memory


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def obey(transport: NixlTransport, what: str, *arguments: str) -> None:
    """``claim``/``sever`` a sender's connections; anything else does nothing and is answered all the same."""
    if what == "claim":
        ARRIVALS.claim((arguments[0], 1))
    elif what == "sever":
        deadline = time.monotonic() + 60
        while not ARRIVALS.sever((arguments[0], 1)):
            transport.notifications()
            if time.monotonic() > deadline:
                raise TimeoutError("the connections stay open")


def main() -> None:
    name, size = sys.argv[1], int(sys.argv[2])
    data = np.zeros(size, dtype=np.uint8)
    transport = NixlTransport(name)
    transport.register([Memory(data.ctypes.data, size)])
    say(metadata=transport.metadata().hex(), address=data.ctypes.data)
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            command = sys.stdin.readline().split()
            if command == ["pause"]:  # until the next command, and do that before the transport is looked at
                say(pausing=True)
                command = sys.stdin.readline().split()
            if not command:
                break
            if command[0] == "received":
                say(obeyed="received", bytes=ARRIVALS.received_bytes((command[1], 1)))
                continue
            obey(transport, *command)
            say(obeyed=command[0], total=int(data.astype(np.int64).sum()))
        for sender, payload in transport.notifications():
            say(sender=sender, payload=payload.decode(), total=int(data.astype(np.int64).sum()))
        time.sleep(0.0005)
    transport.close()


if __name__ == "__main__":
    main()
