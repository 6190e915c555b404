"""A network of one process and host, where prefill workers write into pages of decode workers themselves."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared_memory_device import rows_of

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.mapped_transport import MappedTransport, Side
from antiphon.kv_transfer.peer_memory import PlacedCopies
from antiphon.kv_transfer.transport import Transport


class _Copied:
    def __init__(self, device: OneProcess, rows: list[list[int]]) -> None:
        self._device, self._rows = device, rows

    def done(self) -> bool:
        if not self._device.goes_on.is_set():
            return False
        for source, destination, length in self._rows:
            ctypes.memmove(destination, source, length)
        self._rows = []
        return True


@dataclass
class OneProcess:
    """Implements ``PeerMemory`` and ``HostReach``: what is exported lies where it lies."""

    required: bool = False
    obstacle: str = ""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Cleared: copies do not end."""
    opened: Counter[bytes] = field(default_factory=Counter)
    closed: Counter[bytes] = field(default_factory=Counter)
    sizes: dict[bytes, int] = field(default_factory=dict)
    copied_bytes: int = 0
    waited_for: list[int | None] = field(default_factory=list)
    """The event that each copy was to wait for."""

    def __post_init__(self) -> None:
        self.goes_on.set()

    @property
    def memory(self) -> OneProcess:
        return self

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        handle = str(address).encode()
        self.sizes[handle] = size_bytes
        return handle, 0

    def open(self, handle: bytes) -> tuple[int, int | None]:
        self.opened[handle] += 1
        return int(handle), self.sizes[handle]

    def close(self, address: int) -> None:
        self.closed[str(address).encode()] += 1

    def copy(self, parts: Sequence[PlacedCopies], after: int | None) -> _Copied:
        rows = [row for part in parts for row in rows_of(part)]
        self.copied_bytes += sum(length for _, _, length in rows)
        self.waited_for.append(after)
        return _Copied(self, rows)


class MappedNetwork(InProcessNetwork):
    """See the module.

    Args:
        hosts: beginning of an agent's name -> its host; others share one.
    """

    def __init__(self, *, required: bool = False, hosts: dict[str, str] | None = None) -> None:
        super().__init__()
        self.device = OneProcess(required)
        self._hosts = hosts or {}

    def transport(self, agent_name: str) -> Transport:  # type: ignore[override]
        side = Side.WRITES if agent_name.startswith("p") else Side.IS_WRITTEN
        hosts = (host for begin, host in self._hosts.items() if agent_name.startswith(begin))
        return MappedTransport(super().transport(agent_name), side, self.device, next(hosts, "a host"))
