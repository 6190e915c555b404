"""One rank's probe pages: a peer writes them before it is trusted, and they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from antiphon.kv_transfer.handshake import RankPages
from antiphon.kv_transfer.plan import GroupLayout, Shard, pair_array, plan_pages
from antiphon.kv_transfer.probe import probe_page
from antiphon.kv_transfer.transport import Copies
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import MemoryRegion


class KvPages(Protocol):
    """One rank's pages, as its transfers see them."""

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """What a transport registers: one contiguous region per group."""

    def probe_page(self, group: str) -> int:
        """The page of a group that no sequence ever holds."""

    def read_page(self, group: str, page: int) -> bytes:
        """A copy of one page's bytes."""

    def write_page(self, group: str, page: int, data: bytes) -> None:
        """Overwrite one page; on return the device has done so."""


class ProbePages:
    """See the module.

    Args:
        epoch: of this life of the worker; what it writes to a peer is made from it.
    """

    def __init__(self, layouts: Mapping[str, GroupLayout], shard: Shard, pages: KvPages, epoch: int) -> None:
        self._layouts = layouts
        self._shard = shard
        self._pages = pages
        self._epoch = epoch
        self._filled = False

    def clear(self) -> None:
        """Zero them."""
        for group, layout in self._layouts.items():
            page = self._pages.probe_page(group)
            self._pages.write_page(group, page, bytes(layout.page_bytes(self._shard)))

    def copies(
        self, mine: RankPages, ranks: Sequence[RankPages], pages: Mapping[str, int]
    ) -> list[tuple[str, list[Copies]]]:
        """What this rank writes to which agent of a peer whose probe pages are ``pages``.

        Raises:
            TransferError: stage ``handshake``; the peer names other groups.
        """
        if set(pages) != set(self._layouts):
            raise TransferError("handshake", f"probe pages for {sorted(pages)}, not {sorted(self._layouts)}")
        if not self._filled:  # once per life: several peers may be probed at a time
            self._filled = True
            for group, layout in self._layouts.items():
                page = probe_page(self._epoch, group, layout, self._shard)
                self._pages.write_page(group, self._pages.probe_page(group), page)
        found = []
        for rank in ranks:
            copies = []
            for group, layout in self._layouts.items():
                pairs = pair_array([(self._pages.probe_page(group), pages[group])])
                runs = plan_pages(layout, self._shard, rank.shard, pairs, range(layout.layers))
                if runs is not None:
                    copies.append(Copies(mine.spans[group], rank.spans[group], runs))
            if copies:
                found.append((rank.agent_name, copies))
        return found

    def check(self, seed: int) -> None:
        """Compare them with what a writer of epoch ``seed`` writes.

        Raises:
            TransferError: stage ``handshake``; they differ.
        """
        for group, layout in self._layouts.items():
            found = self._pages.read_page(group, self._pages.probe_page(group))
            if found != probe_page(seed, group, layout, self._shard):
                reason = f"the {group} probe page of rank {self._shard.rank} is not as it was sent"
                raise TransferError("handshake", reason)
