"""One group's pages: who holds each, in which state it is, and an account that must balance.

A page is a slot for ``page_size`` positions of every layer of its group. It is named by its index in the
group's tensor. Who may touch a page, by state:

    state                who holds it                          who may write it      who may read it
    free                 nobody                                nobody                nobody
    used                 sequences that compute                the engine's steps    the engine's steps
    reserved             one reservation waiting for KV        one granted peer      nobody
    pinned_for_transfer  a computed prompt until its release   nobody                engine and transport
    quarantined          an ended attempt until its release    perhaps still a peer  perhaps still a transport
    cached               nobody; known by its content's key    nobody                whoever shares it next

A page may be shared (a prefix), so it counts holds of each kind; its state is the strongest kind held, in the
order quarantined, pinned, reserved, used. Without a hold it is ``cached`` when it has a key, else ``free``.
A page being written by a peer is never shared: it gets its key only when its content is complete.

Holds change on the engine thread only. A page dropped here may be handed out and written at once, by a peer
too, so whoever drops it makes sure that no step in flight touches it (``SequencePages.retire``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum

from antiphon.protocol.errors import AntiphonError, IllegalTransition


class AccountingError(AntiphonError):
    """Pages are held by nobody, or by somebody that the pool does not know of: a defect in the engine."""


class PageState(StrEnum):
    """See the table above."""

    FREE = "free"
    USED = "used"
    RESERVED = "reserved"
    PINNED = "pinned_for_transfer"
    QUARANTINED = "quarantined"
    CACHED = "cached"


class Hold(IntEnum):
    """A kind of claim on a page, weakest first."""

    USED = 0
    RESERVED = 1
    PINNED = 2
    QUARANTINED = 3


_STATE_OF_HOLD = {
    Hold.USED: PageState.USED,
    Hold.RESERVED: PageState.RESERVED,
    Hold.PINNED: PageState.PINNED,
    Hold.QUARANTINED: PageState.QUARANTINED,
}
_LAST_KIND_FIRST = tuple(reversed(Hold))
"""The last kind that a page is held by says its state. Walking the enumeration itself costs ten times as
much, and pages change state by the thousand."""


class PagePool:
    """All pages of one group.

    Pages without a hold are handed out again: free ones first, then the cached page left longest ago.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._holds: list[list[int]] = [[0] * len(Hold) for _ in range(pages)]
        self._total_holds = 0
        self._state = [PageState.FREE] * pages
        self._count: dict[str, int] = {state.value: 0 for state in PageState}
        self._count[PageState.FREE] = pages
        self._free = list(range(pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    # ------------------------------------------------------------------------------------------- queries

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    def state(self, page: int) -> PageState:
        """The state of one page."""
        return self._state[page]

    def counts(self) -> dict[str, int]:
        """Pages by state; the sum is always ``pages``."""
        return dict(self._count)

    def lookup(self, key: bytes) -> int | None:
        """The page with this content, whoever holds it."""
        return self._page_of.get(key)

    # ------------------------------------------------------------------------------------------ commands

    def allocate(self, count: int, hold: Hold) -> list[int]:
        """Take ``count`` pages that nobody holds; ask ``available`` first.

        Raises:
            AccountingError: there are not so many.
        """
        if count > self.available:
            raise AccountingError(f"{count} pages asked for, {self.available} available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._add_hold(page, hold, 1)
            self._settle(page)
            taken.append(page)
        return taken

    def share(self, page: int, hold: Hold = Hold.USED) -> None:
        """Add a hold to a page whose content is complete.

        Raises:
            IllegalTransition: the page is free or still being written by a peer.
        """
        if self._state[page] in (PageState.FREE, PageState.RESERVED):
            raise IllegalTransition(f"page {page} is {self._state[page]} and cannot be shared")
        self._cached.pop(page, None)
        self._add_hold(page, hold, 1)
        self._settle(page)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Add a QUARANTINED hold to held pages, reserved ones included; the other hold is dropped next."""
        for page in pages:
            if not any(self._holds[page]):
                raise IllegalTransition(f"page {page} is {self._state[page]} and nothing to quarantine")
            self._add_hold(page, Hold.QUARANTINED, 1)
            self._settle(page)

    def convert(self, pages: Iterable[int], old: Hold, new: Hold) -> None:
        """Turn one hold of each page into another kind.

        Raises:
            IllegalTransition: a page has no such hold.
        """
        for page in pages:
            self._take_hold(page, old)
            self._add_hold(page, new, 1)
            self._settle(page)

    def drop(self, pages: Iterable[int], hold: Hold, *, cold: bool = False) -> None:
        """Give up one hold of each page. Pages dropped first are evicted first; ``cold`` ones before all
        others.

        Raises:
            IllegalTransition: a page has no such hold.
        """
        for page in pages:
            self._take_hold(page, hold)
            if not any(self._holds[page]):
                if page in self._key_of:
                    self._cached[page] = None
                    self._cached.move_to_end(page, last=not cold)
                else:
                    self._free.append(page)
            self._settle(page)

    def publish(self, page: int, key: bytes) -> None:
        """Say what a held page contains. The first page of equal content keeps the key.

        Raises:
            IllegalTransition: nobody holds the page, a peer may still write it, or it has another key.
        """
        if self._state[page] in (PageState.FREE, PageState.CACHED, PageState.RESERVED):
            raise IllegalTransition(f"page {page} is {self._state[page]} and has no content to publish")
        if self._key_of.get(page, key) != key:
            raise IllegalTransition(f"page {page} already has other content")
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages impossible to find: what is in them is not to be trusted. Holds stay as they are."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is None:
                continue
            del self._page_of[key]
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
                self._settle(page)

    # -------------------------------------------------------------------------------------------- account

    def check(self, expected: Mapping[tuple[int, Hold], int]) -> None:
        """Compare every hold with what the engine's own records say: (page, kind) -> holds.

        Costs as much as there are holds, however many pages exist, so that it can run at every rest.

        Raises:
            AccountingError: names a page whose holds differ, or says which list does not add up.
        """
        if sum(expected.values()) != self._total_holds or any(
            self._holds[page][kind] != holds for (page, kind), holds in expected.items()
        ):
            raise AccountingError(self._difference(expected))
        held = len({page for (page, _), holds in expected.items() if holds})
        if self.available != self.pages - held or sum(self._count.values()) != self.pages:
            raise AccountingError(
                f"{self.available} pages available and {held} held of {self.pages}; by state {self._count}"
            )

    def _difference(self, expected: Mapping[tuple[int, Hold], int]) -> str:
        """The first page and kind whose holds differ from the records."""
        for page, holds in enumerate(self._holds):
            for kind in Hold:
                want = expected.get((page, kind), 0)
                if holds[kind] != want:
                    return f"page {page}: {holds[kind]} holds of {kind.name}, {want} accounted for"
        return f"{self._total_holds} holds counted, {sum(expected.values())} accounted for"

    def _take_hold(self, page: int, hold: Hold) -> None:
        if self._holds[page][hold] == 0:
            raise IllegalTransition(f"page {page} ({self._state[page]}) has no hold of {hold.name}")
        self._add_hold(page, hold, -1)

    def _add_hold(self, page: int, hold: Hold, change: int) -> None:
        self._holds[page][hold] += change
        self._total_holds += change

    def _settle(self, page: int) -> None:
        """Recompute a page's state from its holds."""
        holds = self._holds[page]
        for kind in _LAST_KIND_FIRST:
            if holds[kind]:
                state = _STATE_OF_HOLD[kind]
                break
        else:
            state = PageState.CACHED if page in self._cached else PageState.FREE
        if state is self._state[page]:
            return
        self._count[self._state[page]] -= 1
        self._count[state] += 1
        self._state[page] = state
