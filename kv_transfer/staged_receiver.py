"""The receiving side of staging: spreads what arrives in a slot over its pages, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from antiphon.kv_transfer.handshake import writer_of
from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import StagingMemory, blocks_of, share_of
from antiphon.kv_transfer.transfer_thread import TransferThread
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

_Ident = tuple[str, int, WriteKey, int]


class StagedReceiver:
    """One rank's slots as a receiver. Everything runs on the transfer thread.

    A writer says that nothing of it is under way only when every segment was spread, so whoever trusts that
    need not know of slots. Only a writer that died, or whose connection broke, may leave some: it is shut
    out, for good or until its connections are severed, and once it is quiet nothing that it left changes a
    page.

    Args:
        on_landed: called with (the writer's agent, an encoded WriteDone) once a segment lies in its pages.
    """

    def __init__(
        self,
        layouts: Mapping[str, GroupLayout],
        shard: Shard,
        memory: StagingMemory,
        transfer: TransferThread,
        layer_groups: int,
        on_landed: Callable[[str, bytes], None],
    ) -> None:
        self._layouts = layouts
        self._shard = shard
        self._memory = memory
        self._transfer = transfer
        self._layer_groups = layer_groups
        self._on_landed = on_landed
        self._landed: dict[tuple[str, int], _Ident] = {}
        """(writer's agent, slot) -> what was spread from there last."""
        self._spreading: dict[tuple[str, int], _Ident] = {}
        self._shut_out: Counter[PeerLife] = Counter()
        self.counters: Counter[str] = Counter()

    def staged(self, sender: str, message: StagedWrite) -> None:
        """A segment has arrived in a slot, perhaps not for the first time."""
        place = sender, message.slot
        ident = message.request_id, message.attempt, message.key, message.part
        if self._shut_out[PeerLife(*writer_of(sender))]:
            self.counters["staged_of_shut_out"] += 1
            return
        if self._spreading.get(place) == ident:
            return
        if self._landed.get(place) == ident:
            self._say(sender, message)
            return
        source = Shard(message.source_ranks, message.key.source_rank)
        share = share_of(self._layouts["full"], source, self._shard)
        if share is None:
            raise TransferError("transfer", f"rank {source.rank} of {sender} sends no head to this rank")
        group = message.key.layer_group
        blocks = blocks_of(message.pages, self._layouts, group, self._layer_groups, share.theirs)
        spread = self._memory.scatter(message.offset, blocks)
        self._spreading[place] = ident

        def landed() -> None:
            del self._spreading[place]
            self._landed[place] = ident
            self._say(sender, message)

        self._transfer.when(spread, landed, lambda error: None)

    def shut_out(self, writer: PeerLife) -> None:
        """Begin to spread nothing more of a writer; as often as it is let in again."""
        self._shut_out[writer] += 1

    def let_in(self, writer: PeerLife) -> None:
        """Spread again what a writer stages from here on, unless it is shut out for another reason too."""
        self._shut_out[writer] -= 1

    def forget(self, writer: PeerLife) -> None:
        """Its slots hold nothing any more that could be announced again."""
        self._landed = {k: v for k, v in self._landed.items() if PeerLife(*writer_of(k[0])) != writer}

    def quiet(self, writer: PeerLife) -> bool:
        """Whether nothing of a writer is being spread."""
        return not any(PeerLife(*writer_of(agent)) == writer for agent, _ in self._spreading)

    def _say(self, sender: str, message: StagedWrite) -> None:
        free = SlotFree(message.request_id, message.attempt, message.key, message.part, message.slot)
        if not self._shut_out[PeerLife(*writer_of(sender))]:
            self._transfer.notify(sender, encode(free), lambda outcome: None)
        identity = message.request_id, message.attempt, message.prefill_epoch, message.decode_epoch
        done = WriteDone(*identity, message.key, part=message.part, parts=message.parts)
        self._on_landed(sender, encode(done))
