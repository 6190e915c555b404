"""A transport that writes straight into memory of a peer of the same host, and hands the rest to another one.

A worker that is written to offers its memory: a handle of each span travels with its metadata. A writer maps
what a peer of its own host offers, and a write is then one copy of its own GPU, from its pages to the peer's.
The transport inside carries the notification once the copy is over, and whatever goes to other peers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from antiphon.kv_transfer.host import host_identity
from antiphon.kv_transfer.peer_memory import MappedPeer, Offer, OpenHandles, PeerMemory, RunningCopy
from antiphon.kv_transfer.transport import (
    Copies,
    DeviceEvent,
    Memory,
    Transport,
    TransportFactory,
    WriteId,
    WriteState,
)
from antiphon.protocol.errors import TransferError

_log = logging.getLogger(__name__)


class Side(Enum):
    """What an end does with memory of the host."""

    WRITES = "maps what its peers offer"
    IS_WRITTEN = "offers its own"


class HostReach(Protocol):
    """How one rank reaches memory of GPUs of its host."""

    @property
    def memory(self) -> PeerMemory | None:
        """Its device; absent, nothing is offered or mapped."""

    @property
    def obstacle(self) -> str:
        """Why it is absent."""

    @property
    def required(self) -> bool:
        """Whether a peer is refused whose memory cannot be mapped."""


class _Metadata(msgspec.Struct, frozen=True):
    inner: bytes
    host: str
    offers: tuple[Offer, ...]
    obstacle: str


@dataclass(slots=True)
class _Write:
    """A copy into a peer's memory."""

    name: str
    peer: MappedPeer
    copy: RunningCopy
    notification: bytes
    state: WriteState = WriteState.IN_PROGRESS
    forsaken: bool = False
    """Its peer was disconnected meanwhile."""


class MappedTransport:
    """See Transport, and the module.

    Args:
        inner: carries what is not copied by this rank's GPU.
        host: of this process; empty is never the same as another.
    """

    def __init__(self, inner: Transport, side: Side, reach: HostReach, host: str) -> None:
        self._inner = inner
        self._side = side
        self._memory, self._obstacle, self._required = reach.memory, reach.obstacle, reach.required
        self._host = host
        self._registered: list[Memory] = []
        self._handles = OpenHandles(self._memory) if self._memory is not None else None
        self._mapped: dict[str, MappedPeer] = {}
        self._writes: dict[WriteId, _Write | WriteId] = {}
        """Writes of the transport inside by their names there."""
        self._next_id = 0

    @property
    def agent_name(self) -> str:
        """See Transport."""
        return self._inner.agent_name

    def register(self, memory: Sequence[Memory]) -> None:
        """See Transport."""
        self._inner.register(memory)
        self._registered += memory

    def metadata(self) -> bytes:
        """See Transport."""
        offers: tuple[Offer, ...] = ()
        obstacle, memory = self._obstacle, self._memory
        if self._side is Side.IS_WRITTEN and memory is not None:
            try:
                offers = tuple(_offer(memory, span) for span in self._registered)
            except RuntimeError as error:
                obstacle = str(error)
                if self._required:
                    raise TransferError("handshake", f"transfer.same_host required: {obstacle}") from error
                _log.warning("no peer can map this worker's pages: %s", obstacle)
        metadata = _Metadata(self._inner.metadata(), self._host, offers, obstacle)
        return msgspec.msgpack.encode(metadata)

    def connect(self, metadata: bytes, expected: str = "") -> str:
        """See Transport; what the peer offers is mapped once, however often it is connected."""
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransferError("handshake", f"undecodable metadata: {error}") from error
        for offer in theirs.offers:
            offer.check()
        peer = self._inner.connect(theirs.inner, expected)
        if self._side is Side.IS_WRITTEN:
            return peer
        obstacle = self._map(peer, theirs)
        if not obstacle:
            _log.info("KV goes straight into the pages of %s", peer)
        elif self._required:
            raise TransferError("handshake", f"transfer.same_host required, and of {peer}: {obstacle}")
        else:
            _log.info("KV goes through the network's transport to %s: %s", peer, obstacle)
        return peer

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        """See Transport."""
        mapped = self._mapped.get(peer)
        return mapped is not None and mapped.connected and all(mapped.holds(span) for span in memory)

    def disconnect(self, peer: str) -> None:
        """See Transport; its memory is unmapped as soon as no copy into it is under way."""
        self._inner.disconnect(peer)
        mapped = self._mapped.get(peer)
        if mapped is None:
            return
        mapped.connected = False
        for write in self._writes.values():
            if isinstance(write, _Write) and write.peer is mapped:
                write.forsaken = True
        self._close_if_unused(peer, mapped)

    def post_write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        after: DeviceEvent | None = None,
    ) -> WriteId:
        """See Transport."""
        self._next_id += 1
        write = WriteId(self._next_id)
        copy = self._copy(peer, copies, notification, after)
        self._writes[write] = copy or self._inner.post_write(peer, copies, notification, after)
        return write

    def state(self, write: WriteId) -> WriteState:
        """See Transport."""
        record = self._writes[write]
        if not isinstance(record, _Write):
            return self._inner.state(record)
        if record.state is WriteState.IN_PROGRESS:
            try:
                if not record.copy.done():
                    return WriteState.IN_PROGRESS
            except RuntimeError as error:
                _log.warning("a copy into %s failed: %s", record.name, error)
                record.state = WriteState.FAILED
            else:
                record.state = self._copied(record)
            record.peer.writes -= 1
            self._close_if_unused(record.name, record.peer)
        return record.state

    def release(self, write: WriteId) -> bool:
        """See Transport."""
        record = self._writes[write]
        if isinstance(record, _Write):
            released = self.state(write) is not WriteState.IN_PROGRESS
        else:
            released = self._inner.release(record)
        if released:
            del self._writes[write]
        return released

    def notify(self, peer: str, payload: bytes) -> None:
        """See Transport."""
        self._inner.notify(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        return self._inner.notifications()

    def close(self) -> None:
        """See Transport; memory into which a copy is under way stays mapped until the process ends."""
        for write in list(self._writes):
            self.state(write)
        for peer in list(self._mapped):
            self.disconnect(peer)
        if self._mapped:
            _log.warning("copies into %s were under way at the end", ", ".join(sorted(self._mapped)))
        self._inner.close()

    def _map(self, peer: str, theirs: _Metadata) -> str:
        """Map what a peer offers; what stands in the way, or nothing."""
        if self._handles is None:
            return self._obstacle
        known = self._mapped.get(peer)
        if known is not None:
            if known.offers != theirs.offers:
                raise TransferError("handshake", f"{peer} offers other memory than before")
            known.connected = True
            return ""
        if not theirs.offers:
            return theirs.obstacle or "it offers no memory"
        if not theirs.host or theirs.host != self._host:
            return "it is on another host"
        try:
            self._mapped[peer] = MappedPeer(theirs.offers, self._handles)
        except RuntimeError as error:
            return str(error)
        except TransferError as error:
            raise TransferError("handshake", f"{peer}: {error.reason}") from error
        return ""

    def _copy(
        self, peer: str, copies: Sequence[Copies], notification: bytes, after: DeviceEvent | None
    ) -> _Write | None:
        """Begin a copy; None if this write is for the transport inside."""
        mapped, memory = self._mapped.get(peer), self._memory
        if mapped is None or memory is None or not mapped.connected or not copies:
            return None
        for part in copies:
            if not any(span.holds(part.source) for span in self._registered):
                raise TransferError("post", f"{peer}: source {part.source} is not registered")
        parts = mapped.place(copies)
        if parts is None:
            return None
        try:
            copy = memory.copy(parts, None if after is None else after.handle)
        except (ValueError, RuntimeError) as error:
            raise TransferError("post", f"{peer}: {error}") from error
        mapped.writes += 1
        return _Write(peer, mapped, copy, notification)

    def _copied(self, write: _Write) -> WriteState:
        """Every byte of a write is there: say so."""
        if write.forsaken:
            return WriteState.FAILED
        if write.notification:
            try:
                self._inner.notify(write.name, write.notification)
            except TransferError as error:
                _log.warning("a write arrived, but not its notification: %s", error)
                return WriteState.FAILED
        return WriteState.DONE

    def _close_if_unused(self, peer: str, mapped: MappedPeer) -> None:
        if not mapped.connected and mapped.writes == 0 and self._mapped.get(peer) is mapped:
            del self._mapped[peer]
            mapped.close()


def _offer(memory: PeerMemory, span: Memory) -> Offer:
    handle, offset = memory.export(span.address, span.length_bytes)
    return Offer(span.address, span.length_bytes, handle, offset)


def with_same_host(factory: TransportFactory, side: Side, reach: HostReach | None) -> TransportFactory:
    """Make transports that also reach GPUs of this host; None leaves them as they are."""
    if reach is None:
        return factory
    host = host_identity()
    return lambda agent_name: MappedTransport(factory(agent_name), side, reach, host)
