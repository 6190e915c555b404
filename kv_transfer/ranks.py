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
from antiphon.protocol.kv_messages import RankMemory, WriteKey
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
        *,
        granted: SlotRange | None = None,
        severed: bool = False,
    ) -> Future[bool]:
        """Connect to every rank of a peer, of which ``staging`` is for us; twice is harmless.

        Returns:
            whether this rank's GPU writes straight into the pages of them all.

        Args:
            granted: slots of ours that are for the peer.
            severed: the peer has ended every earlier connection of ours, see ``sever``.
        """

    def disconnect(self, peer: PeerLife) -> Future[None]:
        """Forget a life of a peer, once no write to it is under way."""

    def clear_probe(self) -> Future[None]:
        """Zero the probe pages; what is connected from here on until ``check_probe`` is its writer's."""

    def write_probe(self, peer: PeerLife, pages: dict[str, int]) -> Future[None]:
        """Write this rank's part of the probe into a peer's probe pages."""

    def check_probe(self, writer: PeerLife) -> Future[int]:
        """Bytes that came over TCP meanwhile; fails unless the probe pages hold what this writer writes.

        If they do, it is connected anew, and what it stages counts again if it was severed.
        """

    def ship(self, peer: PeerLife, order: ShipOrder) -> Future[Shipped]:
        """Carry out this rank's part of an order and notify rank 0 of the peer."""

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        """Tell the peer once more of staged writes that it has not said to have spread."""

    def sever(self, writer: PeerLife) -> Future[None]:
        """End the connections over which a living writer's KV comes to this rank.

        Ends once nothing that was sent over them can change a page, or a slot, of this rank any more; the
        writer must not connect anew before that.
        """

    def drop_writer(self, writer: PeerLife) -> Future[None]:
        """The same for a life that is over, of which nothing is taken ever again."""

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
