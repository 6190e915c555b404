"""The receiving side of staging: spreads what arrives in a slot over its pages, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from antiphon.kv_transfer.handshake import PeerKv, writer_of
from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import (
    Block,
    SlotRange,
    StagingMemory,
    blocks_of,
    share_bytes,
    share_of,
    share_offset,
)
from antiphon.kv_transfer.transfer_thread import TransferThread
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

_Ident = tuple[str, int, WriteKey, int]


@dataclass(frozen=True, slots=True)
class _Writer:
    """A transfer agent that may stage here."""

    life: PeerLife
    shard: Shard
    slots: SlotRange


class StagedReceiver:
    """One rank's slots as a receiver. Everything runs on the transfer thread.

    A writer says that nothing of it is under way only when every segment was spread, so whoever trusts that
    need not know of slots. Only a writer that died, or whose connection broke, may leave some: it is shut
    out, for good or until it has connected anew, and once it is quiet nothing that it left changes a page.

    Args:
        pages: page group -> how many pages this rank has of it.
        on_landed: called with (the writer's agent, an encoded WriteDone) once a segment lies in its pages.
    """

    def __init__(
        self,
        layouts: Mapping[str, GroupLayout],
        shard: Shard,
        memory: StagingMemory,
        transfer: TransferThread,
        layer_groups: int,
        pages: Mapping[str, int],
        on_landed: Callable[[str, bytes], None],
    ) -> None:
        self._layouts = layouts
        self._shard = shard
        self._memory = memory
        self._transfer = transfer
        self._layer_groups = layer_groups
        self._pages = pages
        self._on_landed = on_landed
        self._writers: dict[str, _Writer] = {}
        self._landed: dict[tuple[str, int], _Ident] = {}
        """(writer's agent, slot) -> what was spread from there last."""
        self._spreading: dict[tuple[str, int], _Ident] = {}
        self._shut_out: Counter[PeerLife] = Counter()
        self._severed: set[PeerLife] = set()
        """Writers that may not know yet that they were severed."""

    def let_stage(self, writer: PeerKv, slots: SlotRange) -> None:
        """From here on these slots are this writer's."""
        life = PeerLife(writer.worker_id, writer.epoch)
        for rank in writer.ranks:
            self._writers[rank.agent_name] = _Writer(life, rank.shard, slots)

    def staged(self, sender: str, message: StagedWrite) -> None:
        """A segment has arrived in a slot, perhaps not for the first time.

        Raises:
            TransferError: stage ``transfer``; no such write of this writer can be spread. No byte is touched.
        """
        writer = self._writers.get(sender)
        if writer is None:
            raise TransferError("transfer", "it was given no slots here")
        place = sender, message.slot
        ident = message.request_id, message.attempt, message.key, message.part
        if self._is_shut_out(writer.life):
            return
        if self._spreading.get(place) == ident:
            return
        if self._landed.get(place) == ident:
            self._say(sender, message)
            return
        if place in self._spreading:
            raise TransferError("transfer", f"slot {message.slot} is being spread")
        spread = self._memory.scatter(message.offset, self._blocks(writer, message))
        self._spreading[place] = ident

        def landed() -> None:
            del self._spreading[place]
            self._landed[place] = ident
            self._say(sender, message)

        self._transfer.when(spread, landed, lambda error: None)

    def shut_out(self, writer: PeerLife) -> None:
        """Begin to spread nothing more of a writer; as often as it is let in again."""
        self._shut_out[writer] += 1

    def severed(self, writer: PeerLife) -> None:
        """It was shut out while its connections were ended: what it stages counts once it is connected anew.

        By then it has given up all that it had told before, also after they were ended, where there are
        none that can be: to spread that would change pages that it has said not to write any more.
        """
        self._shut_out[writer] -= 1
        self._severed.add(writer)

    def connected_anew(self, writer: PeerLife) -> None:
        """Spread again what a writer stages from here on, unless it is shut out for another reason."""
        self._severed.discard(writer)

    def forget(self, writer: PeerLife) -> None:
        """Its slots hold nothing any more that could be announced again."""
        self._landed = {k: v for k, v in self._landed.items() if PeerLife(*writer_of(k[0])) != writer}

    def withdraw(self, writer: PeerLife) -> None:
        """Its life is over: no slots are its own any more."""
        self._writers = {agent: each for agent, each in self._writers.items() if each.life != writer}
        self._severed.discard(writer)

    def _is_shut_out(self, writer: PeerLife) -> bool:
        return self._shut_out[writer] > 0 or writer in self._severed

    def quiet(self, writer: PeerLife) -> bool:
        """Whether nothing of a writer is being spread."""
        return not any(PeerLife(*writer_of(agent)) == writer for agent, _ in self._spreading)

    def _blocks(self, writer: _Writer, message: StagedWrite) -> list[Block]:
        """Where the bytes of a staged write go; refuses one that leaves its writer's room or our pages."""

        def require(fits: bool, what: str) -> None:
            if not fits:
                raise TransferError("transfer", what)

        source, key, slots = Shard(message.source_ranks, message.key.source_rank), message.key, writer.slots
        require(source == writer.shard, f"it speaks as rank {source.rank} of {source.tensor_parallel}")
        share = share_of(self._layouts["full"], source, self._shard)
        if share is None:
            raise TransferError("transfer", "it sends no head to this rank")
        require(0 <= message.part < message.parts, f"part {message.part} of {message.parts}")
        require(0 <= key.layer_group < self._layer_groups, f"layer group {key.layer_group}")
        require(
            slots.first <= message.slot < slots.first + slots.count, f"slot {message.slot} is not its own"
        )
        slot_bytes = self._memory.region.page_bytes
        offset = share_offset(message.slot, slot_bytes, share)
        require(message.offset == offset, f"offset {message.offset} in slot {message.slot}, not {offset}")
        for each in message.pages:
            require(each.group in self._layouts, f"page group {each.group!r}")
            outside = [page for page in each.pages if not 0 <= page < self._pages[each.group]]
            require(not outside, f"{each.group} pages {outside[:3]} of {self._pages[each.group]}")
        blocks = blocks_of(message.pages, self._layouts, key.layer_group, self._layer_groups, share.theirs)
        size = sum(
            len(block.pages) * len(block.layers) * len(block.heads) * self._layouts[block.group].head_bytes
            for block in blocks
        )
        room = share_bytes(slot_bytes, share)
        require(size <= room, f"{size} bytes in {room} of a slot")
        return blocks

    def _say(self, sender: str, message: StagedWrite) -> None:
        free = SlotFree(message.request_id, message.attempt, message.key, message.part, message.slot)
        if not self._is_shut_out(PeerLife(*writer_of(sender))):
            self._transfer.notify(sender, encode(free), lambda outcome: None)
        identity = message.request_id, message.attempt, message.prefill_epoch, message.decode_epoch
        done = WriteDone(*identity, message.key, part=message.part, parts=message.parts)
        self._on_landed(sender, encode(done))
