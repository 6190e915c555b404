"""The TCP connections over which writes arrive in this process, and how to end those of one writer for good.

Over TCP, UCX carries a one-sided write as a message that this process copies into place. So a writer's death
is not the end of its writes: what its kernel holds is still delivered, minutes later if the network was cut,
and lands in pages that belong to somebody else by then. Shared memory, CUDA IPC and RDMA have nothing of it:
there the writer's own process, or its network card, moves the bytes.

UCX offers no way to end an accepted connection. Its sockets are found through ``/proc``: what it listens on
appears while an agent is made, and what it accepted has the same port.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_LISTENING = "0A"
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128
"""Length of the kernel's ``struct tcp_info`` as asked for, and where ``tcpi_bytes_received`` stands in it."""
_TABLES = ("/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6")

Life = tuple[str, int]
"""(worker id, epoch) of a writer."""


class Arrivals(Protocol):
    """The connections over which writes arrive, as one rank's KV end sees them."""

    def begin_claim(self) -> None:
        """A writer is about to connect; only one may be at a time."""

    def claim(self, writer: Life) -> None:
        """What was opened since ``begin_claim`` is this writer's."""

    def received_bytes(self, writer: Life) -> int:
        """What came over a claimed writer's connections since ``begin_claim``."""

    def sever(self, writer: Life) -> bool:
        """End a writer's connections; True once nothing that it sent can arrive any more."""


class ArrivedConnections:
    """What UCX accepted in this process, by the writer that connected. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports: set[int] = set()
        self._known_before: set[int] = set()
        self._received_before: dict[int, int] = {}
        self._of: dict[Life, set[int]] = {}
        """Inodes of a writer's sockets."""
        self._ending: dict[Life, frozenset[int]] = {}

    @contextmanager
    def agent_opens(self) -> Iterator[None]:
        """What this process begins to listen on inside the block is the agent's."""
        before = set(_sockets(listening=True))
        yield
        with self._lock:
            self._ports |= {
                port for inode, (_, port) in _sockets(listening=True).items() if inode not in before
            }

    def begin_claim(self) -> None:
        """A writer is about to connect, and perhaps to be connected to; only one may be at a time."""
        with self._lock:
            sockets = _sockets(listening=False) if self._ports else {}
            self._known_before = set(sockets)
            self._received_before = {
                i: _received_bytes(sockets[i][0], i) for i in self._claimed() & sockets.keys()
            }

    def claim(self, writer: Life) -> None:
        """What was opened since ``begin_claim`` is this writer's.

        That may be more than UCX's connection with it; other links of this process recover when severed.
        """
        with self._lock:
            opened = set(_sockets(listening=False)) if self._ports else set()
            self._of.setdefault(writer, set()).update(opened - self._known_before - self._claimed())

    def received_bytes(self, writer: Life) -> int:
        """What came over a claimed writer's connections since ``begin_claim``: 0 where KV moves otherwise."""
        with self._lock:
            sockets = _sockets(listening=False) if self._ports else {}
            return sum(
                _received_bytes(sockets[inode][0], inode) - self._received_before.get(inode, 0)
                for inode in self._of.get(writer, set()) & sockets.keys()
            )

    def sever(self, writer: Life) -> bool:
        """End a writer's connections; True once nothing that it sent can arrive any more.

        False asks for another call: UCX still has to take what arrived before, and to close its sockets.
        Connections that nobody claimed may be anybody's, and end as well.
        """
        with self._lock:
            if not self._ports:
                return True
            sockets = _sockets(listening=False)
            if writer not in self._ending:
                accepted = {inode for inode, (_, port) in sockets.items() if port in self._ports}
                self._ending[writer] = frozenset(self._of.get(writer, set()) | accepted - self._claimed())
            left = [inode for inode in self._ending[writer] if inode in sockets]
            for inode in left:
                _shut_down(sockets[inode][0], inode)
            if not left:
                del self._ending[writer]
                self._of.pop(writer, None)
            return not left

    def _claimed(self) -> set[int]:
        return {inode for inodes in self._of.values() for inode in inodes}


ARRIVALS = ArrivedConnections()
"""Those of this process: UCX's sockets belong to it as a whole."""


def _sockets(*, listening: bool) -> dict[int, tuple[int, int]]:
    """Inode -> (file descriptor, local port) of this process's TCP sockets in this thread's network."""
    ports: dict[int, int] = {}
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError), open(table) as lines:  # no IPv6 here, or not Linux
            next(lines)
            for line in lines:
                columns = line.split()
                if (columns[3] == _LISTENING) == listening:
                    ports[int(columns[9])] = int(columns[1].rpartition(":")[2], 16)
    found: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd") if ports else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket" and int(inode[1:-1]) in ports:
                found[int(inode[1:-1])] = int(name), ports[int(inode[1:-1])]
    return found


def _received_bytes(descriptor: int, inode: int) -> int:
    """Payload that a connection has received, by the kernel's account; 0 once it is closed."""
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)
        with socket.socket(fileno=copy) as connection:
            if os.fstat(copy).st_ino == inode:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                return int.from_bytes(info[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], sys.byteorder)
    return 0


def _shut_down(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # closed, or shut down, meanwhile
        copy = os.dup(descriptor)
        if os.fstat(copy).st_ino != inode:  # the number names another file by now
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)
