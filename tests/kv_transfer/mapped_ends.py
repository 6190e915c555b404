"""A writer and whom it writes to, of one host or of two, over a stand-in for GPUs that map memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from shared_memory_device import Allocation, SharedHost, SharedMemoryDevice

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.mapped_transport import MappedTransport, Side
from antiphon.kv_transfer.transport import Copies, Memory, WriteId

HERE = "this host"


def runs(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True)
class Reach:
    """Implements ``HostReach``."""

    memory: SharedMemoryDevice | None
    obstacle: str = ""
    required: bool = False


class Pair:
    """A writer and whom it writes to, each with a span in the middle of an allocation."""

    def __init__(self, *, required: bool = False, their_host: str = HERE) -> None:
        self.network, self.host = InProcessNetwork(), SharedHost()
        self.required = required
        self.device = SharedMemoryDevice(self.host)
        self.source, self.target = Allocation(self.host, 4096, fill=7), Allocation(self.host, 4096)
        self.mine = inside(self.source.memory)
        self.theirs = [inside(self.target.memory)]
        self.writer = self.make_writer()
        self.writer.register([self.mine])
        self.receiver = self.make_receiver("d/1", their_host)

    def make_writer(self, name: str = "p", host: str = HERE, **changes: Any) -> MappedTransport:
        reach = Reach(**({"memory": self.device, "required": self.required} | changes))
        return MappedTransport(self.network.transport(name), Side.WRITES, reach, host)

    def make_receiver(self, name: str, host: str = HERE, **changes: Any) -> MappedTransport:
        device = SharedMemoryDevice(self.host)
        reach = Reach(**({"memory": device, "required": self.required} | changes))
        receiver = MappedTransport(self.network.transport(name), Side.IS_WRITTEN, reach, host)
        receiver.register(self.theirs)
        return receiver

    def post(self, notification: bytes = b"word", *, peer: str = "d/1") -> WriteId:
        return self.writer.post_write(
            peer, [Copies(self.mine, self.theirs[0], runs((0, 32, 64), (128, 256, 16)))], notification
        )

    def check_written(self) -> None:
        """The two runs of ``post``, and nothing beside them."""
        begin = self.theirs[0].address - self.target.memory.address
        expected = [0] * 4096
        for offset, length in ((32, 64), (256, 16)):
            expected[begin + offset : begin + offset + length] = [7] * length
        assert self.target.bytes.tolist() == expected


def inside(span: Memory) -> Memory:
    return Memory(span.address + 512, 2048, "VRAM")
