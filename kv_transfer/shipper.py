"""From an order to one write per destination rank, and one notification of them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache

import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.checksum import crc32_of
from antiphon.kv_transfer.handshake import PeerKv, RankPages, check_order
from antiphon.kv_transfer.plan import GroupLayout, pair_array, plan_pages
from antiphon.kv_transfer.ranks import Shipped
from antiphon.kv_transfer.transfer_thread import TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Copies, DeviceEvent
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteChecksum, WriteDone, WriteKey
from antiphon.protocol.layer_groups import layer_range
from antiphon.protocol.rank_messages import ShipOrder

_Pages = tuple[tuple[int, int], ...]
_Pairs = tuple[PeerKv, tuple[_Pages, _Pages], dict[str, NDArray[np.int64]]]
"""Whose, full and sliding ones, and the same as arrays."""


class Shipper:
    """Plans and posts the writes of one source rank.

    Args:
        pages: this rank's.
        layer_groups: parts in which a chunk is shipped.
        epoch: of this life of the worker.
    """

    def __init__(
        self,
        layouts: Mapping[str, GroupLayout],
        pages: RankPages,
        transfer: TransferThread,
        layer_groups: int,
        epoch: int,
        *,
        verify_checksums: bool,
    ) -> None:
        self._layouts = layouts
        self._pages = pages
        self._transfer = transfer
        self._layer_groups = layer_groups
        self._epoch = epoch
        self._verify_checksums = verify_checksums
        self._last: _Pairs | None = None

    def ship(
        self,
        peer: PeerKv,
        order: ShipOrder,
        source_ready: Callable[[], bool],
        source_event: Callable[[], DeviceEvent | None] | None = None,
    ) -> Future[Shipped]:
        """Carry out this rank's part.

        Writes are planned before their source is ready, and posted once it is; or, to a peer whose pages are
        mapped, as soon as there is an event for the GPU to wait for, and then on the caller's thread if the
        transport is at rest.

        With one destination rank that is rank 0 the notification travels with the write. Otherwise it is sent
        to rank 0 once all of them are done; with nothing to write it is sent at once.

        Args:
            source_event: of a peer whose pages are mapped.
        """
        lead = peer.ranks[0].agent_name
        shipped: Future[Shipped] = Future()
        after: DeviceEvent | None = None

        @cache
        def plan() -> list[tuple[RankPages, list[Copies]]]:
            pairs = self._pairs(peer, order)
            return [(rank, copies) for rank in peer.ranks if (copies := self._copies(order, pairs, rank))]

        def post() -> None:
            try:
                parts = plan()
                notification = self._notification(order, parts[0][1] if len(parts) == 1 else [])
            except TransferError as error:
                shipped.set_exception(error)
                return
            size = sum(part.total_bytes for _, copies in parts for part in copies)

            def end(error: TransferError | None) -> None:
                if error is not None:
                    shipped.set_exception(error)
                else:
                    shipped.set_result(Shipped(notification, size))

            def finished(outcome: WriteOutcome) -> None:
                end(outcome.error)

            if len(parts) == 1 and parts[0][0].agent_name == lead:
                self._transfer.write(lead, parts[0][1], notification, finished, after)
                return

            def notified(outcome: WriteOutcome) -> None:
                # Nothing else tells that a connection is broken over which no page goes.
                error = outcome.error
                end(None if error is None else TransferError("connection", error.reason))

            def notify(error: TransferError | None) -> None:
                if error is not None:
                    end(error)
                else:
                    self._transfer.notify(lead, notification, notified)

            self._write_all(parts, notify, after)

        def may_begin() -> bool:
            nonlocal after
            try:
                plan()
            except TransferError:
                return True  # which ``post`` says
            after = source_event() if source_event is not None else None
            return after is not None or source_ready()

        self._transfer.when(may_begin, post, shipped.set_exception, at_once=source_event is not None)
        return shipped

    def _write_all(
        self,
        parts: list[tuple[RankPages, list[Copies]]],
        then: Callable[[TransferError | None], None],
        after: DeviceEvent | None,
    ) -> None:
        """Post one write per destination rank; ``then`` is called once none of them is under way."""
        left = len(parts)
        first_error: TransferError | None = None

        def one_done(outcome: WriteOutcome) -> None:
            nonlocal left, first_error
            left -= 1
            first_error = first_error or outcome.error
            if left == 0:
                then(first_error)

        for rank, copies in parts:
            self._transfer.write(rank.agent_name, copies, b"", one_done, after)
        if not parts:
            then(None)

    def _notification(self, order: ShipOrder, checked: list[Copies]) -> bytes:
        key = WriteKey(self._pages.shard.rank, order.chunk, order.layer_group)
        checksum = self._checksum(checked) if self._verify_checksums and checked else None
        identity = order.request_id, order.attempt, self._epoch, order.decode_epoch
        return encode(WriteDone(*identity, key, checksum))

    def _checksum(self, copies: list[Copies]) -> WriteChecksum:
        """Of bytes that are final in host memory: the source pages are neither computed nor freed again."""
        group_of = {span: group for group, span in self._pages.spans.items()}
        spans, crc = [], 0
        for part in copies:
            crc = crc32_of(part.source, part.runs[:, [0, 2]], crc)
            spans += [(group_of[part.source], to, length) for _, to, length in part.runs.tolist()]
        return WriteChecksum(spans, crc)

    def _copies(
        self, order: ShipOrder, pairs: Mapping[str, NDArray[np.int64]], rank: RankPages
    ) -> list[Copies]:
        copies = []
        for group, chosen in pairs.items():
            layout = self._layouts[group]
            layers = layer_range(layout.layers, order.layer_group, self._layer_groups)
            runs = plan_pages(layout, self._pages.shard, rank.shard, chosen, layers)
            if runs is not None:
                copies.append(Copies(self._pages.spans[group], rank.spans[group], runs))
        return copies

    def _pairs(self, peer: PeerKv, order: ShipOrder) -> dict[str, NDArray[np.int64]]:
        """Page group -> the pages of an order, see ``pair_array``; all layer groups of a chunk have the same.

        Raises:
            TransferError: see ``check_order``.
        """
        pages = order.full, order.sliding
        if self._last is None or self._last[0] is not peer or self._last[1] != pages:
            check_order(peer, order)
            named = zip(("full", "sliding"), pages, strict=True)
            self._last = peer, pages, {group: pair_array(each) for group, each in named if each}
        return self._last[2]
