"""The receiving side of staging: spreads what arrives in a slot over its pages, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.staging import StagingMemory, blocks_of, share_of
from antiphon.kv_transfer.transfer_thread import TransferThread
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.messages import WriteDone, WriteKey
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

_Ident = tuple[str, int, WriteKey, int]


class StagedReceiver:
    """One rank's slots as a receiver. Everything runs on the transfer thread.

    A writer says that nothing of it is under way only when every segment was spread, so whoever trusts that
    need not know of slots. Only a writer that died may leave some: see ``drop``.

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
        self._dropped: set[str] = set()
        self.counters: Counter[str] = Counter()

    def staged(self, sender: str, message: StagedWrite) -> None:
        """A segment has arrived in a slot, perhaps not for the first time."""
        place = sender, message.slot
        ident = message.request_id, message.attempt, message.key, message.part
        if sender in self._dropped or self._spreading.get(place) == ident:
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

    def drop(self, agents: frozenset[str]) -> Future[None]:
        """These agents are over: nothing of them is spread any more once the future has ended."""
        dropped: Future[None] = Future()
        self._dropped |= agents

        def quiet() -> bool:
            return not any(agent in agents for agent, _ in self._spreading)

        def forget() -> None:
            self._landed = {k: v for k, v in self._landed.items() if k[0] not in agents}
            dropped.set_result(None)

        self._transfer.when(quiet, forget, dropped.set_exception)
        return dropped

    def _say(self, sender: str, message: StagedWrite) -> None:
        free = SlotFree(message.request_id, message.attempt, message.key, message.part, message.slot)
        if sender not in self._dropped:
            self._transfer.notify(sender, encode(free), lambda outcome: None)
        identity = message.request_id, message.attempt, message.prefill_epoch, message.decode_epoch
        done = WriteDone(*identity, message.key, part=message.part, parts=message.parts)
        self._on_landed(sender, encode(done))
