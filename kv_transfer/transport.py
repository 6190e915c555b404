"""The transport seam: registered memory, one-sided writes with a notification, and little else.

``nixl_transport.py`` moves bytes between processes; ``in_process.py`` moves them inside one, and can lose,
delay, repeat and corrupt on demand. Everything above this seam is the same code for both.

No method of a transport may be called from two threads at a time. ``post_write`` to a peer that it ``maps``
may be called from any, everything else from the one that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.plan import PageRuns
from antiphon.protocol.errors import TransferError

WriteId = NewType("WriteId", int)
"""Names one write of one transport from ``post_write`` until ``release``."""


class WriteState(Enum):
    """Where a posted write stands."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    """Every byte is at the destination and the notification was handed over."""
    FAILED = "failed"
    """The write ended without that; it will not touch the destination any more once released."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of registered memory. ``kind`` is ``DRAM`` or ``VRAM``, ``device`` the CUDA ordinal or 0."""

    address: int
    length_bytes: int
    kind: str = "DRAM"
    device: int = 0

    @property
    def end(self) -> int:
        """First address after the span."""
        return self.address + self.length_bytes

    def holds(self, part: Memory) -> bool:
        """Whether all of ``part`` lies in this span."""
        same = part.kind == self.kind and part.device == self.device
        return same and self.address <= part.address and part.end <= self.end


class Copies:
    """Byte runs to copy from one local to one remote span of registered memory.

    Args:
        source, destination: the registered spans that every run must lie in.
        runs: [N, 3] int64 rows of (offset in source, offset in destination, length), all in bytes; or what
            they follow from, which a transport may know to work with as it is.
    """

    __slots__ = ("_rows", "destination", "pages", "source")

    def __init__(self, source: Memory, destination: Memory, runs: NDArray[np.int64] | PageRuns) -> None:
        self.source = source
        self.destination = destination
        self.pages = runs if isinstance(runs, PageRuns) else None
        self._rows = None if isinstance(runs, PageRuns) else runs

    @property
    def runs(self) -> NDArray[np.int64]:
        """The rows."""
        if self._rows is None:
            assert self.pages is not None
            self._rows = self.pages.rows()
        return self._rows

    @property
    def count(self) -> int:
        """How many runs there are; of pages whose rows nobody asked for, neighbours count apart."""
        return len(self.pages) if self._rows is None and self.pages is not None else len(self.runs)

    @property
    def total_bytes(self) -> int:
        """Sum of the lengths."""
        return self.pages.total_bytes if self.pages is not None else int(self.runs[:, 2].sum())

    def check(self) -> None:
        """Refuse a run that is empty or leaves its span.

        Raises:
            TransferError: stage ``post``; names the run and the span.
        """
        if self.runs.ndim != 2 or self.runs.shape[1] != 3 or len(self.runs) == 0:
            raise TransferError("post", f"expected [N, 3] runs, found shape {self.runs.shape}")
        for name, column, span in (("source", 0, self.source), ("destination", 1, self.destination)):
            offsets, lengths = self.runs[:, column], self.runs[:, 2]
            # No sum: that of two numbers of a peer may pass 64 bits, and then lie inside.
            bad = (offsets < 0) | (lengths <= 0) | (offsets > span.length_bytes - lengths)
            if bad.any():
                row = self.runs[int(bad.argmax())].tolist()
                raise TransferError(
                    "post", f"{name} of run {row} lies outside the {span.length_bytes} registered bytes"
                )


class DeviceEvent(Protocol):
    """A point in the work that a GPU of this process was given."""

    @property
    def handle(self) -> int:
        """Of CUDA's event, which was recorded."""

    def __call__(self) -> bool:
        """Whether the GPU has come past it; does not block."""


class Transport(Protocol):
    """Moves bytes into a peer's registered memory. Errors are TransferError with the stage that failed."""

    @property
    def agent_name(self) -> str:
        """Unique for one life of one rank of one worker."""

    def register(self, memory: Sequence[Memory]) -> None:
        """Make spans of local memory readable by own writes and writable by connected peers."""

    def metadata(self) -> bytes:
        """What a peer needs to connect; taken after ``register``."""

    def connect(self, metadata: bytes, expected: str = "") -> str:
        """Accept a peer's metadata and return its agent name. Connecting twice is harmless.

        Args:
            expected: the name that it must be of. Of another's nothing is kept, and a connection to that one
                is as it was. Empty: of anybody.
        """

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        """Whether this process's own GPU writes straight into that peer's memory, and into all of this."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its unfinished writes fail."""

    def post_write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        after: DeviceEvent | None = None,
    ) -> WriteId:
        """Start writing; once every byte has landed the peer receives ``notification``, unless it is empty.

        The source must not change before the write has ended.

        Args:
            after: when the source is ready, and the GPU begins by itself; only to a peer that ``maps`` names.
        """

    def state(self, write: WriteId) -> WriteState:
        """Where a write stands; does not block."""

    def release(self, write: WriteId) -> bool:
        """Forget a write. False when it is still moving bytes and cannot be stopped: try again later."""

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification that belongs to no write."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived as (sender's agent name, payload), oldest first per sender."""

    def close(self) -> None:
        """Deregister everything and disconnect from everyone."""


def require_name(found: str, expected: str) -> None:
    """Metadata is of who was to be connected, or of anybody where that is empty.

    Raises:
        TransferError: stage ``handshake``; it is another's. Names both.
    """
    if expected not in ("", found):
        raise TransferError("handshake", f"metadata of {found} instead of {expected}")


def refuse_waiting(peer: str, after: DeviceEvent | None) -> None:
    """For what only the host can start.

    Raises:
        TransferError: stage ``post``; the write was to wait for a GPU.
    """
    if after is not None:
        raise TransferError("post", f"a write to {peer} cannot wait for a GPU: its pages are not mapped")


TransportFactory = Callable[[str], Transport]
"""Makes a transport from its agent name."""
