"""Hosts of workers whose KV transport loses things on purpose; imported by the deployment's processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.cluster.actors import DecodeActor, PrefillActor
from antiphon.kv_transfer.transport import Copies, DeviceEvent, Memory, Transport, WriteId, WriteState
from antiphon.protocol.codec import decode
from antiphon.protocol.kv_messages import WriteDone

FAILED_WRITE = 3
"""The write of KV (counted from 1) that ends in an error though it was posted."""
LOST_NOTIFICATION = 9
"""The notification of written KV that never arrives."""


def journal(what: str) -> None:
    """Tell the test that a fault struck: the folder comes with the import path of this module."""
    with (Path(__file__).parent / ".faults.log").open("a") as log:
        log.write(f"{what}\n")


class FaultyTransport:
    """Everything is passed on to NIXL but the events that are lost."""

    def __init__(self, agent_name: str) -> None:
        from antiphon.kv_transfer.nixl_transport import NixlTransport

        self._inner: Transport = NixlTransport(agent_name)
        self._writes = 0
        self._arrived = 0
        self._failed: set[WriteId] = set()

    @property
    def agent_name(self) -> str:
        return self._inner.agent_name

    def register(self, memory: Sequence[Memory]) -> None:
        self._inner.register(memory)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, metadata: bytes, expected: str = "") -> str:
        return self._inner.connect(metadata, expected)

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        return self._inner.maps(peer, memory)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def post_write(
        self, peer: str, copies: Sequence[Copies], notification: bytes, after: DeviceEvent | None = None
    ) -> WriteId:
        said = b"" if self._fails(notification) else notification
        write = self._inner.post_write(peer, copies, said, after)
        if self._writes == FAILED_WRITE and not self._failed:
            self._failed.add(write)
            journal("write failed")
        return write

    def state(self, write: WriteId) -> WriteState:
        state = self._inner.state(write)
        return WriteState.FAILED if write in self._failed and state is WriteState.DONE else state

    def release(self, write: WriteId) -> bool:
        return self._inner.release(write)

    def notify(self, peer: str, payload: bytes) -> None:
        self._inner.notify(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        return [(who, payload) for who, payload in self._inner.notifications() if not self._lost(payload)]

    def close(self) -> None:
        self._inner.close()

    def _fails(self, notification: bytes) -> bool:
        if is_kv(notification):
            self._writes += 1
            return self._writes == FAILED_WRITE
        return False

    def _lost(self, payload: bytes) -> bool:
        if payload == b"":
            return True  # of the write that failed
        if is_kv(payload):
            self._arrived += 1
            if self._arrived == LOST_NOTIFICATION:
                journal("notification lost")
                return True
        return False


def is_kv(payload: bytes) -> bool:
    """Whether a notification says that KV of a request was written."""
    return bool(payload) and isinstance(decode(payload), WriteDone)


class FaultyPrefillActor(PrefillActor):
    """One of its writes fails."""

    transport_factory = FaultyTransport


class FaultyDecodeActor(DecodeActor):
    """One notification never arrives."""

    transport_factory = FaultyTransport
