"""A transport that times and counts what goes through another one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from antiphon.kv_transfer.transport import (
    Copies,
    DeviceEvent,
    Memory,
    Transport,
    TransportFactory,
    WriteId,
    WriteState,
)
from antiphon.protocol.rank_messages import WriteSample
from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopHistograms
from antiphon.telemetry.registry import PREFIX, ProcessRegistry

VLLM_NAMES = {
    "kv_transfer_seconds": ("nixl_xfer_time_seconds",),
    "kv_transfer_post_seconds": ("nixl_post_time_seconds",),
    "kv_transfer_bytes": ("nixl_bytes_transferred",),
    "kv_transfer_descriptors": ("nixl_num_descriptors",),
}
"""What of vLLM's metrics a writer of KV has a counterpart of."""


class WriteObserver(Protocol):
    """Is told of the writes of one transport by whichever thread uses it, one at a time."""

    def began(self) -> None:
        """A write is under way: it was posted, and its source is computed."""

    def arrived(self, sample: WriteSample) -> None:
        """A write was seen done."""

    def released(self) -> None:
        """A write is under way no more."""


class TransferMetrics:
    """Histograms of single writes, by rank. Each rank's are updated on one thread."""

    def __init__(self, registry: ProcessRegistry) -> None:
        def histograms(name: str, text: str, bounds: Sequence[float]) -> LoopHistograms:
            return LoopHistograms(f"{PREFIX}kv_transfer_{name}", text, bounds, "rank", registry)

        self._seconds = histograms(
            "seconds", "From posting a computed write to seeing it done.", buckets.TRANSFER_S
        )
        self._post_seconds = histograms("post_seconds", "What posting a write took.", buckets.TRANSFER_S)
        self._bytes = histograms("bytes", "Size of a write.", buckets.TRANSFER_BYTES)
        self._descriptors = histograms("descriptors", "Runs of bytes in a write.", buckets.DESCRIPTORS)
        self._in_flight = 0
        text = "Writes of rank 0 that are under way; none whose source is still to be computed."
        registry.gauge("kv_transfers_in_flight", text).set_function(lambda: self._in_flight)

    def observe(self, rank: int, sample: WriteSample) -> None:
        """Count a write that arrived."""
        name = str(rank)
        self._seconds.of(name).observe(sample.seconds)
        self._post_seconds.of(name).observe(sample.post_seconds)
        self._bytes.of(name).observe(sample.size_bytes)
        self._descriptors.of(name).observe(sample.descriptors)

    def began(self) -> None:
        """See WriteObserver; rank 0's transport is observed right here."""
        self._in_flight += 1

    def arrived(self, sample: WriteSample) -> None:
        """See WriteObserver."""
        self.observe(0, sample)

    def released(self) -> None:
        """See WriteObserver."""
        self._in_flight -= 1


class WriteLog:
    """Keeps the samples of another rank until rank 0, which exports them, is answered."""

    def __init__(self) -> None:
        self._samples: deque[WriteSample] = deque()

    def began(self) -> None:
        """See WriteObserver."""

    def arrived(self, sample: WriteSample) -> None:
        """See WriteObserver."""
        self._samples.append(sample)

    def released(self) -> None:
        """See WriteObserver."""

    def take(self) -> tuple[WriteSample, ...]:
        """Those that were not taken yet; may be called on any thread."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._samples.popleft())
        return tuple(taken)


@dataclass(slots=True)
class _Posted:
    at: float
    post_seconds: float
    bytes: int
    descriptors: int
    after: DeviceEvent | None
    """What its source waits for; None once that was seen passed, from when on the write is timed."""
    seen_done: bool = False


class MeasuredTransport:
    """See Transport: everything is handed on."""

    def __init__(self, inner: Transport, observer: WriteObserver) -> None:
        self._inner = inner
        self._observer = observer
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

    def connect(self, metadata: bytes, expected: str = "") -> str:
        """See Transport."""
        return self._inner.connect(metadata, expected)

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        """See Transport."""
        return self._inner.maps(peer, memory)

    def disconnect(self, peer: str) -> None:
        """See Transport."""
        self._inner.disconnect(peer)

    def post_write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        after: DeviceEvent | None = None,
    ) -> WriteId:
        """See Transport."""
        start = time.monotonic()
        write = self._inner.post_write(peer, copies, notification, after)
        post_s = time.monotonic() - start
        size, runs = sum(part.total_bytes for part in copies), sum(part.count for part in copies)
        self._posted[write] = _Posted(start, post_s, size, runs, after)
        if after is None:
            self._observer.began()
        return write

    def state(self, write: WriteId) -> WriteState:
        """See Transport."""
        posted = self._posted[write]
        if posted.after is not None and posted.after():
            posted.at, posted.after = time.monotonic(), None
            self._observer.began()
        state = self._inner.state(write)
        if state is WriteState.DONE and not posted.seen_done:
            posted.seen_done = True
            seconds = time.monotonic() - posted.at
            self._observer.arrived(
                WriteSample(seconds, posted.post_seconds, posted.bytes, posted.descriptors)
            )
        return state

    def release(self, write: WriteId) -> bool:
        """See Transport."""
        released = self._inner.release(write)
        if released and self._posted.pop(write).after is None:
            self._observer.released()
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


def measured(factory: TransportFactory, observer: WriteObserver) -> TransportFactory:
    """Make transports whose writes are observed."""
    return lambda agent_name: MeasuredTransport(factory(agent_name), observer)
