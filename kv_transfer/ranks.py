"""One rank's end of a worker's KV transfers, wherever that rank runs.

A worker of several ranks holds one ``RankKv`` for each: rank 0's is in its own process (``endpoint.py``), the
others' are reached over links (``rank_links.py``). Whoever uses them does not know the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from antiphon.kv_transfer.staging import SlotRange
from antiphon.protocol.messages import RankMemory, WriteKey
from antiphon.protocol.rank_messages import ShipOrder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerLife:
    """One life of a worker that KV is written to."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Shipped:
    """An order that was carried out: every byte of this rank's part has arrived and was notified."""

    notification: bytes
    """The WriteDone that the peer was sent, in case it asks for it again."""
    size_bytes: int


class RankKv(Protocol):
    """See the module. Futures fail with TransferError, and never stay open once the rank is gone."""

    @property
    def memory(self) -> RankMemory:
        """The rank's transfer agent and its registered pages."""

    def connect(
        self,
        peer: PeerLife,
        tensor_parallel: int,
        ranks: Sequence[RankMemory],
        staging: SlotRange | None = None,
    ) -> Future[None]:
        """Connect to every rank of a peer, of which ``staging`` is for us; twice is harmless."""

    def disconnect(self, peer: PeerLife) -> Future[None]:
        """Forget a life of a peer, once no write to it is under way."""

    def clear_probe(self) -> Future[None]:
        """Zero the probe pages."""

    def write_probe(self, peer: PeerLife, pages: dict[str, int]) -> Future[None]:
        """Write this rank's part of the probe into a peer's probe pages."""

    def check_probe(self, seed: int) -> Future[None]:
        """Fails unless the probe pages hold what the writer of epoch ``seed`` writes."""

    def ship(self, peer: PeerLife, order: ShipOrder) -> Future[Shipped]:
        """Carry out this rank's part of an order and notify rank 0 of the peer."""

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        """Tell the peer once more of staged writes that it has not said to have spread."""

    def drop_writer(self, agents: frozenset[str]) -> Future[None]:
        """These agents of a writer are over; ends once nothing that they staged is spread any more."""

    def expect(self, change: int) -> None:
        """Add to (or take from) the number of sets whose writes are being waited for."""


def all_of(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """The results of all, in order, once all have ended; the error of the first that failed, if any."""
    joined: Future[list[T]] = Future()
    left, lock = len(futures), threading.Lock()

    def one_done(done: Future[T]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            _settle(joined, futures)

    if not futures:
        joined.set_result([])
    for future in futures:
        future.add_done_callback(one_done)
    return joined


def _settle(joined: Future[list[T]], futures: Sequence[Future[T]]) -> None:
    for future in futures:
        error = future.exception()
        if error is not None:
            joined.set_exception(error)
            return
    joined.set_result([future.result() for future in futures])
