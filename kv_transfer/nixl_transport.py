"""KV over NIXL with its UCX backend: shared memory or TCP for DRAM, cuda_ipc or RDMA for VRAM.

The only file that imports nixl. NIXL's progress thread is left off, because it spins on a core of its own
(0.9 of a core while idle, measured): whoever owns the transport polls instead, and that poll is what moves
emulated one-sided operations forward on both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nixl
import numpy as np

from antiphon.kv_transfer.arrivals import ARRIVALS
from antiphon.kv_transfer.transport import (
    Copies,
    DeviceEvent,
    Memory,
    WriteId,
    WriteState,
    refuse_waiting,
    require_name,
)
from antiphon.protocol.errors import HandshakeError, TransferError

_log = logging.getLogger(__name__)
_BACKEND = "UCX"
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.IN_PROGRESS, "ERR": WriteState.FAILED}


@dataclass(slots=True)
class _Write:
    peer: str
    handle: Any
    state: WriteState


class NixlTransport:
    """One agent; see Transport. Not safe for two threads at a time."""

    def __init__(self, agent_name: str) -> None:
        """Raises HandshakeError when NIXL has no UCX backend here."""
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to stdout what we log ourselves
        self._name = agent_name
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        with ARRIVALS.agent_opens():
            self._agent = nixl.nixl_agent(agent_name, config)
        if _BACKEND not in self._agent.backends:
            raise HandshakeError(f"NIXL offers {self._agent.get_plugin_list()}, but not {_BACKEND}")
        self._registered: list[tuple[Memory, Any]] = []
        self._peers: set[str] = set()
        self._named: dict[bytes, str] = {}
        """Metadata of connected peers -> their names."""
        self._writes: dict[WriteId, _Write] = {}
        self._next_id = 0

    @property
    def agent_name(self) -> str:
        """See Transport."""
        return self._name

    def register(self, memory: Sequence[Memory]) -> None:
        """See Transport."""
        for span in memory:
            rows = [(span.address, span.length_bytes, span.device, "")]
            try:
                descriptors = self._agent.register_memory(rows, span.kind, backends=[_BACKEND])
            except Exception as error:
                raise TransferError("handshake", f"cannot register {span}: {error!r}") from error
            self._registered.append((span, descriptors))

    def metadata(self) -> bytes:
        """See Transport."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, expected: str = "") -> str:
        """See Transport; NIXL itself refuses other metadata of a connected name."""
        known = self._named.get(metadata)
        if known is not None:
            require_name(known, expected)
        if known in self._peers and not any(record.peer == known for record in self._writes.values()):
            self.disconnect(known)  # its connection may be broken, and nothing but this makes a new one
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError("handshake", f"cannot load a peer's metadata: {error!r}") from error
        peer = name.decode() if isinstance(name, bytes) else str(name)
        try:
            require_name(peer, expected)
        except TransferError:
            if peer not in self._peers:
                self._agent.remove_remote_agent(peer)
            raise
        self._peers.add(peer)
        self._named[metadata] = peer
        return peer

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        """See Transport; what UCX maps of a peer is its own affair."""
        return False

    def disconnect(self, peer: str) -> None:
        """See Transport."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._named = {data: name for data, name in self._named.items() if name != peer}
            self._agent.remove_remote_agent(peer)

    def post_write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        after: DeviceEvent | None = None,
    ) -> WriteId:
        """See Transport."""
        refuse_waiting(peer, after)
        if peer not in self._peers:
            raise TransferError("post", f"not connected to {peer}")
        for part in copies:
            part.check()
            if not any(span.holds(part.source) for span, _ in self._registered):
                raise TransferError("post", f"source {part.source} is not registered")
        kinds = {(part.source.kind, part.destination.kind) for part in copies}
        if len(kinds) != 1:
            raise TransferError("post", f"one write cannot mix kinds of memory: {sorted(kinds)}")
        source_kind, destination_kind = kinds.pop()
        local = np.concatenate([_rows(part.source, part.runs[:, 0], part.runs[:, 2]) for part in copies])
        remote = np.concatenate(
            [_rows(part.destination, part.runs[:, 1], part.runs[:, 2]) for part in copies]
        )
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, source_kind),
                self._agent.get_xfer_descs(remote, destination_kind),
                peer,
                notification,
                backends=[_BACKEND],
            )
            state = _STATES[self._agent.transfer(handle)]
        except nixl.nixlRemoteDisconnectError as error:  # every later post would fail as well
            raise TransferError("connection", f"{peer}: {error!r}") from error
        except Exception as error:
            raise TransferError("post", f"{peer}: {error!r}") from error
        self._next_id += 1
        write = WriteId(self._next_id)
        self._writes[write] = _Write(peer, handle, state)
        return write

    def state(self, write: WriteId) -> WriteState:
        """See Transport."""
        record = self._writes[write]
        if record.state is WriteState.IN_PROGRESS:
            try:
                record.state = _STATES[self._agent.check_xfer_state(record.handle)]
            except Exception as error:  # every class of NIXL error ends the write
                _log.warning("write %d failed: %r", write, error)
                record.state = WriteState.FAILED
        return record.state

    def release(self, write: WriteId) -> bool:
        """See Transport."""
        # NIXL cancels what is under way and says that it did, but what was handed to a socket arrives all
        # the same, minutes later if the link was cut: only a write that has ended cannot land any more.
        if self.state(write) is WriteState.IN_PROGRESS:
            return False
        self._writes.pop(write).handle.release()
        return True

    def notify(self, peer: str, payload: bytes) -> None:
        """See Transport."""
        try:
            self._agent.send_notif(peer, payload)  # its backend argument is not usable
        except Exception as error:
            raise TransferError("notify", f"{peer}: {error!r}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        return [
            (sender, bytes(payload))
            for sender, payloads in self._agent.get_new_notifs(backends=[_BACKEND]).items()
            for payload in payloads
        ]

    def close(self) -> None:
        """See Transport."""
        for write, record in self._writes.items():
            try:
                record.handle.release()
            except Exception as error:  # it has begun to be aborted, which is all that can be done here
                _log.warning("write %d was under way when its transport closed: %r", write, error)
        self._writes.clear()
        for peer in list(self._peers):
            self.disconnect(peer)
        for _, descriptors in self._registered:
            self._agent.deregister_memory(descriptors, backends=[_BACKEND])
        self._registered.clear()


def _rows(span: Memory, offsets: Any, lengths: Any) -> Any:
    """[N, 3] uint64 rows of (address, length, device), the form that NIXL takes."""
    rows = np.empty((len(offsets), 3), dtype=np.uint64)
    rows[:, 0] = offsets + span.address
    rows[:, 1] = lengths
    rows[:, 2] = span.device
    return rows
