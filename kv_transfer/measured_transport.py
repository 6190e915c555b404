"""A transport that times and counts what goes through another one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.kv_transfer.transport import Copies, Memory, Transport, TransportFactory, WriteId, WriteState
from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopHistogram
from antiphon.telemetry.registry import PREFIX, ProcessRegistry

VLLM_NAMES = {
    "kv_transfer_seconds": ("nixl_xfer_time_seconds",),
    "kv_transfer_post_seconds": ("nixl_post_time_seconds",),
    "kv_transfer_bytes": ("nixl_bytes_transferred",),
    "kv_transfer_descriptors": ("nixl_num_descriptors",),
}
"""What of vLLM's metrics a writer of KV has a counterpart of."""


class TransferMetrics:
    """Histograms of single writes. Updated on the transfer thread only."""

    def __init__(self, registry: ProcessRegistry) -> None:
        def histogram(name: str, text: str, bounds: Sequence[float]) -> LoopHistogram:
            return LoopHistogram(f"{PREFIX}kv_transfer_{name}", text, bounds, registry)

        self.seconds = histogram("seconds", "From posting a write to seeing it done.", buckets.TRANSFER_S)
        self.post_seconds = histogram("post_seconds", "What posting a write took.", buckets.TRANSFER_S)
        self.bytes = histogram("bytes", "Size of a write.", buckets.TRANSFER_BYTES)
        self.descriptors = histogram("descriptors", "Runs of bytes in a write.", buckets.DESCRIPTORS)
        self.in_flight = 0
        registry.gauge("kv_transfers_in_flight", "Writes that are under way.").set_function(
            lambda: self.in_flight
        )


@dataclass(slots=True)
class _Posted:
    at: float
    bytes: int
    descriptors: int
    seen_done: bool = False


class MeasuredTransport:
    """See Transport: everything is handed on."""

    def __init__(self, inner: Transport, metrics: TransferMetrics) -> None:
        self._inner = inner
        self._metrics = metrics
        self._posted: dict[WriteId, _Posted] = {}

    @property
    def agent_name(self) -> str:
        """See Transport."""
        return self._inner.agent_name

    def register(self, memory: Sequence[Memory]) -> None:
        """See Transport."""
        self._inner.register(memory)

    def metadata(self) -> bytes:
        """See Transport."""
        return self._inner.metadata()

    def connect(self, metadata: bytes) -> str:
        """See Transport."""
        return self._inner.connect(metadata)

    def disconnect(self, peer: str) -> None:
        """See Transport."""
        self._inner.disconnect(peer)

    def post_write(self, peer: str, copies: Sequence[Copies], notification: bytes) -> WriteId:
        """See Transport."""
        start = time.monotonic()
        write = self._inner.post_write(peer, copies, notification)
        self._metrics.post_seconds.observe(time.monotonic() - start)
        size, runs = sum(part.total_bytes for part in copies), sum(len(part.runs) for part in copies)
        self._posted[write] = _Posted(start, size, runs)
        self._metrics.in_flight += 1
        return write

    def state(self, write: WriteId) -> WriteState:
        """See Transport."""
        state = self._inner.state(write)
        posted = self._posted[write]
        if state is WriteState.DONE and not posted.seen_done:
            posted.seen_done = True
            self._metrics.seconds.observe(time.monotonic() - posted.at)
            self._metrics.bytes.observe(posted.bytes)
            self._metrics.descriptors.observe(posted.descriptors)
        return state

    def release(self, write: WriteId) -> bool:
        """See Transport."""
        released = self._inner.release(write)
        if released:
            del self._posted[write]
            self._metrics.in_flight -= 1
        return released

    def notify(self, peer: str, payload: bytes) -> None:
        """See Transport."""
        self._inner.notify(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        return self._inner.notifications()

    def close(self) -> None:
        """See Transport."""
        self._inner.close()


def measured(factory: TransportFactory, metrics: TransferMetrics) -> TransportFactory:
    """Make transports whose writes are observed."""
    return lambda agent_name: MeasuredTransport(factory(agent_name), metrics)
