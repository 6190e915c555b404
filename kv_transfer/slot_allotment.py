"""Which staging slots of a receiver belong to which of its writers."""

from __future__ import annotations

import logging

from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.staging import SlotRange

_log = logging.getLogger(__name__)


class SlotAllotment:
    """Deals out slots, ``each`` to a writer, until there are none; whoever comes later writes pages directly.

    Args:
        total: slots of every rank.
        each: of one writer; 0 when nothing is staged.
    """

    def __init__(self, total: int, each: int) -> None:
        self._each = each
        self._free = [SlotRange(first, each) for first in range(0, total - each + 1, each)] if each else []
        self._held: dict[Writer, SlotRange] = {}

    def of(self, writer: Writer) -> SlotRange | None:
        """A writer's slots, the same at every call; None when there are none for it."""
        if writer not in self._held and self._free:
            self._held[writer] = self._free.pop(0)
        if self._each and writer not in self._held:
            _log.warning("no staging slots are left for %s: it writes pages directly", writer.worker_id)
        return self._held.get(writer)

    def end(self, writer: Writer) -> None:
        """This writer is over, and nothing that it staged is spread any more."""
        slots = self._held.pop(writer, None)
        if slots is not None:
            self._free.append(slots)
