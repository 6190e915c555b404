"""What two workers tell each other before a KV byte moves, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.kv_transfer.plan import GroupLayout, Shard, group_layouts
from antiphon.kv_transfer.transport import Memory
from antiphon.protocol.errors import HandshakeError, TransferError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.kv_messages import KvHello, KvWelcome, MemoryRegion, RankMemory
from antiphon.protocol.rank_messages import ShipOrder

STAGING = "staging"
"""Name of the region that holds a rank's staging slots."""
_ADDRESSES = 2**63
"""No address is as high as that, so offsets and lengths fit into 64 signed bits."""
_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class RankPages:
    """Where one rank of a worker keeps its pages."""

    shard: Shard
    agent_name: str
    spans: Mapping[str, Memory]
    """Page group -> its registered memory, page after page."""
    pages: Mapping[str, int]
    """Page group -> how many."""
    staging: Memory | None = None
    """Its slots, one after the other; None when it has none."""
    slot_bytes: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class PeerKv:
    """A worker that KV may move to or from."""

    worker_id: str
    epoch: int
    ranks: tuple[RankPages, ...]

    @property
    def agent_names(self) -> frozenset[str]:
        """Transfer agents of its ranks."""
        return frozenset(rank.agent_name for rank in self.ranks)

    def check_pages(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Refuse pages (page group -> pages) that not all of its ranks have, or that are named twice.

        Raises:
            HandshakeError: names the group and the first such pages.
        """
        for group, pages in wanted.items():
            has = min(rank.pages.get(group, 0) for rank in self.ranks)
            outside = [page for page in pages if not 0 <= page < has]
            if outside:
                raise HandshakeError(f"{group} pages {outside[:3]} of {self.worker_id}, which has {has}")
            if len(set(pages)) < len(pages):  # what would lie there is a matter of luck
                twice = sorted(page for page, times in Counter(pages).items() if times > 1)
                raise HandshakeError(f"{group} pages {twice[:3]} of {self.worker_id} more than once")


def check_order(peer: PeerKv, order: ShipOrder) -> None:
    """Refuse an order of pages that the peer does not have, or of one twice.

    Raises:
        TransferError: stage ``post``; names them.
    """
    wanted = {"full": order.full, "sliding": order.sliding}
    try:
        peer.check_pages({group: [theirs for _, theirs in pairs] for group, pairs in wanted.items()})
    except HandshakeError as error:
        raise TransferError("post", str(error)) from error


def agent_name(worker_id: str, epoch: int, rank: int) -> str:
    """The name of a rank's transfer agent; no other life of the worker has it."""
    return f"{worker_id}/{epoch:x}/{rank}"


def writer_of(agent: str) -> tuple[str, int]:
    """(worker id, epoch) of a transfer agent's worker.

    Raises:
        HandshakeError: no worker gives an agent such a name.
    """
    worker_id, _, rest = agent.rpartition("/")[0].rpartition("/")
    try:
        return worker_id, int(rest, 16)
    except ValueError as error:
        raise HandshakeError(f"{agent} is not the name of a worker's transfer agent") from error


def span_of(region: MemoryRegion) -> Memory:
    """A region as registered memory."""
    return Memory(region.address, region.pages * region.page_bytes, region.memory, region.device)


def rank_pages(layouts: Mapping[str, GroupLayout], tensor_parallel: int, memory: RankMemory) -> RankPages:
    """One rank's pages, checked against what its layout says they must be.

    Raises:
        HandshakeError: a group is missing, or its pages have another size.
    """
    shard = Shard(tensor_parallel, memory.rank)
    for each in memory.regions:
        _check_region(memory.rank, each)
    spans, pages = {}, {}
    for group, layout in layouts.items():
        region = next((region for region in memory.regions if region.group == group), None)
        if region is None:
            raise HandshakeError(f"rank {memory.rank} registered no {group} pages")
        if region.page_bytes != layout.page_bytes(shard):
            raise HandshakeError(
                f"{group} pages of rank {memory.rank}: {region.page_bytes} bytes there, "
                f"{layout.page_bytes(shard)} by the fingerprint"
            )
        spans[group], pages[group] = span_of(region), region.pages
    staging = next((region for region in memory.regions if region.group == STAGING), None)
    if staging is None:
        return RankPages(shard, memory.agent_name, spans, pages)
    slots = span_of(staging), staging.page_bytes, staging.pages
    return RankPages(shard, memory.agent_name, spans, pages, *slots)


def _check_region(rank: int, region: MemoryRegion) -> None:
    """Numbers of a memory that can be: with others the arithmetic of addresses would not hold."""
    size = region.pages * region.page_bytes
    if region.pages < 1 or region.page_bytes < 0 or not 0 <= region.address < _ADDRESSES - size:
        raise HandshakeError(
            f"{region.group} memory of rank {rank}: {region.pages} pages of {region.page_bytes} bytes at "
            f"{region.address}"
        )
    if region.memory not in ("DRAM", "VRAM") or not 0 <= region.device < _DEVICES:
        raise HandshakeError(f"{region.group} memory of rank {rank}: {region.memory} {region.device}")


def check_peer(mine: KvFingerprint, theirs: KvHello | KvWelcome) -> PeerKv:
    """The peer's pages, if its KV means the same as ours.

    Raises:
        HandshakeError: it does not; one line names every difference with both values. Or what it says of its
            memory cannot be.
    """
    differences = mine.differences(theirs.fingerprint)
    if differences:
        raise HandshakeError("; ".join(differences))
    numbers = [memory.rank for memory in theirs.ranks]
    if not numbers or len(numbers) != theirs.tensor_parallel or numbers != list(range(len(numbers))):
        raise HandshakeError(f"{theirs.worker_id} has {theirs.tensor_parallel} ranks and describes {numbers}")
    for memory in theirs.ranks:
        expected = agent_name(theirs.worker_id, theirs.epoch, memory.rank)
        if memory.agent_name != expected:
            raise HandshakeError(f"a transfer agent is named {memory.agent_name}, not {expected}")
    layouts = group_layouts(mine)
    ranks = tuple(rank_pages(layouts, theirs.tensor_parallel, memory) for memory in theirs.ranks)
    kv = PeerKv(theirs.worker_id, theirs.epoch, ranks)
    if isinstance(theirs, KvWelcome):
        kv.check_pages({group: (page,) for group, page in theirs.probe_pages.items()})
        _check_slots(kv, theirs.staging)
    return kv


def _check_slots(kv: PeerKv, granted: tuple[int, int] | None) -> None:
    if granted is None:
        return
    first, count = granted
    for rank in kv.ranks:
        if first < 0 or count < 1 or first + count > rank.slots:
            raise HandshakeError(
                f"slots {first} .. {first + count - 1} of rank {rank.shard.rank} of {kv.worker_id}, "
                f"which has {rank.slots}"
            )


def page_pairs(
    logical_and_local: Sequence[tuple[int, int]], remote_pages: Sequence[int], first_logical: int
) -> list[tuple[int, int]]:
    """(local page, remote page) for the logical pages that the remote side wants.

    ``remote_pages[i]`` is the remote page of logical page ``first_logical + i``.
    """
    return [
        (local, remote_pages[logical - first_logical])
        for logical, local in logical_and_local
        if 0 <= logical - first_logical < len(remote_pages)
    ]
