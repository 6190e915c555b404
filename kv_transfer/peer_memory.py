"""Memory of GPUs that other processes of the host map: the seam to the device, and what is open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.transport import Copies, Memory
from antiphon.protocol.errors import TransferError

_log = logging.getLogger(__name__)
_ADDRESSES = 2**62
"""No address is as high as that, so the sum of one and an offset fits into 64 signed bits."""
_AT_ONCE = np.zeros((1, 2), dtype=np.int64)
"""The places of an entry that is one run."""


@dataclass(frozen=True, slots=True)
class PlacedCopies:
    """Copies whose destination is mapped, as a device takes them.

    Attributes:
        entries: [N, 2] int64, dense: numbers of what is copied at the source and at the destination; or
            [N, 3]: and its bytes.
        steps: bytes from one number to the next, at the source and at the destination.
        places: [R, 2] int64, dense: where the runs of every entry begin in it, in bytes.
        length: bytes of every run, if entries have none.
        source, destination: (address in this process, bytes) of the spans that every run must lie in.
    """

    entries: NDArray[np.int64]
    steps: tuple[int, int]
    places: NDArray[np.int64]
    length: int
    source: tuple[int, int]
    destination: tuple[int, int]

    @staticmethod
    def of(copies: Copies, address: int) -> PlacedCopies:
        """Copies whose destination begins at ``address``."""
        spans = (
            (copies.source.address, copies.source.length_bytes),
            (address, copies.destination.length_bytes),
        )
        if copies.pages is None:
            return PlacedCopies(np.ascontiguousarray(copies.runs), (1, 1), _AT_ONCE, 0, *spans)
        part = copies.pages.part
        return PlacedCopies(copies.pages.pairs, part.page_bytes, part.places, part.length, *spans)


class RunningCopy(Protocol):
    """A copy that the device was given."""

    def done(self) -> bool:
        """Whether every byte is there; does not block.

        Raises:
            RuntimeError: it has ended in an error, or was not begun as a whole, and writes no more.
        """


class PeerMemory(Protocol):
    """What the device of one rank does with memory of other processes."""

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """The handle of the allocation that these bytes of this process lie in, and their offset in it.

        Raises:
            RuntimeError: other processes cannot map it; says why.
        """

    def open(self, handle: bytes) -> tuple[int, int | None]:
        """Map another process' allocation; its address here and its bytes, None if the device does not say.

        Raises:
            RuntimeError: it cannot be reached from here, or is gone; says why.
        """

    def close(self, address: int) -> None:
        """Give up what was opened; no copy into it is under way.

        Raises:
            RuntimeError: CUDA refused.
        """

    def copy(self, parts: Sequence[PlacedCopies], after: int | None) -> RunningCopy:
        """Begin to copy.

        Args:
            parts: at least one.
            after: handle of a recorded CUDA event that must have passed before.

        Raises:
            ValueError: a run that leaves its span, or that this device cannot copy; names it.
            RuntimeError: nothing was begun; says why.
        """


class Offer(msgspec.Struct, frozen=True):
    """A span of a peer's memory, and how to map it."""

    address: int
    """In the peer's process."""
    length_bytes: int
    handle: bytes
    """Of the whole allocation."""
    offset: int
    """Where the span begins in it."""

    def check(self) -> None:
        """Refuse numbers that no memory has: with them the arithmetic of addresses would not hold.

        Raises:
            TransferError: stage ``handshake``; says the numbers.
        """
        last = _ADDRESSES - self.length_bytes
        if self.length_bytes < 1 or not 0 <= self.address <= last or not 0 <= self.offset <= last:
            what = f"{self.length_bytes} bytes at {self.address}, {self.offset} into an allocation"
            raise TransferError("handshake", f"memory that cannot be is offered: {what}")

    def check_within(self, size_bytes: int) -> None:
        """Refuse a span that leaves its allocation: a write there would end all work of the writer's GPU.

        Raises:
            TransferError: stage ``handshake``; says the numbers.
        """
        if self.offset + self.length_bytes > size_bytes:
            what = f"{self.length_bytes} bytes at {self.offset} of an allocation of {size_bytes}"
            raise TransferError("handshake", f"memory that is not there is offered: {what}")


class OpenHandles:
    """Allocations of other processes that are mapped, each once however many spans lie in it."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._open: dict[bytes, tuple[int, int | None, int]] = {}
        """Handle -> (address here, bytes, spans that use it)."""

    def open(self, handle: bytes) -> tuple[int, int | None]:
        """Where an allocation lies here, and its bytes, see PeerMemory.

        Raises:
            RuntimeError: it cannot be mapped.
        """
        address, size, users = self._open.get(handle) or (*self._memory.open(handle), 0)
        self._open[handle] = address, size, users + 1
        return address, size

    def close(self, handle: bytes) -> None:
        """One span needs it no more."""
        address, size, users = self._open.pop(handle)
        if users > 1:
            self._open[handle] = address, size, users - 1
            return
        try:
            self._memory.close(address)
        except RuntimeError as error:  # it stays until this process ends
            _log.warning("memory of a peer stays mapped: %s", error)


@dataclass(frozen=True, slots=True)
class MappedSpan:
    """A span of a peer's memory that lies at ``address`` of this process."""

    offer: Offer
    address: int


class MappedPeer:
    """The mapped memory of one life of one rank of a peer.

    Raises:
        RuntimeError: a span cannot be mapped; none of them is then.
        TransferError: stage ``handshake``; a span leaves its allocation, and again none is mapped.
    """

    def __init__(self, offers: tuple[Offer, ...], handles: OpenHandles) -> None:
        self.offers = offers
        self.connected = True
        self.writes = 0
        """Copies into it that are under way."""
        self._handles = handles
        self._spans: list[MappedSpan] = []
        try:
            for offer in offers:
                address, size = handles.open(offer.handle)
                self._spans.append(MappedSpan(offer, address + offer.offset))
                if size is not None:
                    offer.check_within(size)
        except (RuntimeError, TransferError):
            self.close()
            raise

    def close(self) -> None:
        """Unmap it; no copy into it is under way."""
        while self._spans:
            self._handles.close(self._spans.pop().offer.handle)

    def place(self, copies: Sequence[Copies]) -> list[PlacedCopies] | None:
        """Where a write goes; None if a destination is not mapped.

        A destination lies in what was offered (``_find``), which lies in the allocation that was opened
        (``Offer.check_within``); that each run lies in its destination is up to the device.
        """
        parts = []
        for part in copies:
            address = self._find(part.destination)
            if address is None:
                return None
            parts.append(PlacedCopies.of(part, address))
        return parts

    def holds(self, span: Memory) -> bool:
        """Whether a span of the peer's is mapped."""
        return self._find(span) is not None

    def _find(self, span: Memory) -> int | None:
        for mapped in self._spans:
            offset = span.address - mapped.offer.address
            if 0 <= offset <= mapped.offer.length_bytes - span.length_bytes:
                return mapped.address + offset
        return None
