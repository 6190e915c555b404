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


_STATE_OF_HOLD = (PageState.USED, PageState.RESERVED, PageState.PINNED, PageState.QUARANTINED)
"""By kind of hold."""
_BITS = 24
"""A page's holds are one number, so many bits for each kind: pages change hands by the thousand, and nearly
always one hold of one kind takes the place of another, which is then one comparison and one assignment."""
_ONE = tuple(1 << (_BITS * kind) for kind in Hold)
_MOST = (1 << _BITS) - 1


class PagePool:
    """All pages of one group.

    Pages without a hold are handed out again: free ones first, then the cached page left longest ago.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._holds = [0] * pages
        self._total_holds = 0
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

    def available_beside(self, pages: Iterable[int]) -> int:
        """Pages that ``allocate`` could hand out after these were shared."""
        cached = self._cached
        return self.available - sum(page in cached for page in pages)

    def state(self, page: int) -> PageState:
        """The state of one page."""
        holds = self._holds[page]
        if holds:
            return _state_of(holds)
        return PageState.CACHED if page in self._cached else PageState.FREE

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
        free = min(count, len(self._free))
        rest = len(self._free) - free
        taken = self._free[rest:]
        taken.reverse()  # from the end of the list
        del self._free[rest:]
        for _ in range(count - free):
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            taken.append(page)
        holds, one = self._holds, _ONE[hold]
        for page in taken:
            holds[page] = one
        self._total_holds += count
        self._count[PageState.FREE] -= free
        self._count[PageState.CACHED] -= count - free
        self._count[_STATE_OF_HOLD[hold]] += count
        return taken

    def share(self, pages: Iterable[int], hold: Hold = Hold.USED) -> None:
        """Add a hold to pages whose content is complete.

        Raises:
            IllegalTransition: a page is free or still being written by a peer.
        """
        holds, cached, one = self._holds, self._cached, _ONE[hold]
        taken = 0
        for page in pages:
            if page in cached:
                del cached[page]
                holds[page] = one
                taken += 1
                continue
            state = self.state(page)
            if state is PageState.FREE or state is PageState.RESERVED:
                raise IllegalTransition(f"page {page} is {state} and cannot be shared")
            self._add_hold(page, state, hold)
        self._total_holds += taken
        self._count[PageState.CACHED] -= taken
        self._count[_STATE_OF_HOLD[hold]] += taken

    def quarantine(self, pages: Iterable[int]) -> None:
        """Add a QUARANTINED hold to held pages, reserved ones included; the other hold is dropped next."""
        for page in pages:
            state = self.state(page)
            if not self._holds[page]:
                raise IllegalTransition(f"page {page} is {state} and nothing to quarantine")
            self._add_hold(page, state, Hold.QUARANTINED)

    def convert(self, pages: Iterable[int], old: Hold, new: Hold) -> None:
        """Turn one hold of each page into another kind.

        Raises:
            IllegalTransition: a page has no such hold.
        """
        holds, before, after = self._holds, _ONE[old], _ONE[new]
        alone = 0
        for page in pages:
            if holds[page] == before:
                holds[page] = after
                alone += 1
            else:
                self._add_hold(page, self._take_hold(page, old), new)
        self._count[_STATE_OF_HOLD[old]] -= alone
        self._count[_STATE_OF_HOLD[new]] += alone

    def drop(self, pages: Iterable[int], hold: Hold, *, cold: bool = False) -> None:
        """Give up one hold of each page. Pages dropped first are evicted first; ``cold`` ones before all
        others.

        Raises:
            IllegalTransition: a page has no such hold.
        """
        holds, one, keys, cached = self._holds, _ONE[hold], self._key_of, self._cached
        left_cached = left_free = 0
        for page in pages:
            if holds[page] != one:
                self._count[self._take_hold(page, hold)] -= 1
                self._count[_state_of(holds[page])] += 1
                continue
            holds[page] = 0
            if page in keys:
                cached[page] = None
                if cold:
                    cached.move_to_end(page, last=False)
                left_cached += 1
            else:
                self._free.append(page)
                left_free += 1
        self._total_holds -= left_cached + left_free
        self._count[_STATE_OF_HOLD[hold]] -= left_cached + left_free
        self._count[PageState.CACHED] += left_cached
        self._count[PageState.FREE] += left_free

    def publish(self, pages: Iterable[int], keys: Iterable[bytes]) -> None:
        """Say what held pages contain, each a key. The first page of equal content keeps the key.

        Raises:
            IllegalTransition: nobody holds a page, a peer may still write it, or it has another key.
        """
        holds, key_of, page_of, used = self._holds, self._key_of, self._page_of, _ONE[Hold.USED]
        for page, key in zip(pages, keys, strict=True):
            if holds[page] != used:
                state = self.state(page)
                if state in (PageState.FREE, PageState.CACHED, PageState.RESERVED):
                    raise IllegalTransition(f"page {page} is {state} and has no content to publish")
            if key_of.get(page, key) != key:
                raise IllegalTransition(f"page {page} already has other content")
            if key not in page_of:
                page_of[key] = page
                key_of[page] = key

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
                self._count[PageState.CACHED] -= 1
                self._count[PageState.FREE] += 1

    # -------------------------------------------------------------------------------------------- account

    def check(self, expected: Mapping[tuple[int, Hold], int]) -> None:
        """Compare every hold with what the engine's own records say: (page, kind) -> holds.

        Costs as much as there are holds, however many pages exist, so that it can run at every rest.

        Raises:
            AccountingError: names a page whose holds differ, or says which list does not add up.
        """
        if sum(expected.values()) != self._total_holds or any(
            self._holds_of(page, kind) != holds for (page, kind), holds in expected.items()
        ):
            raise AccountingError(self._difference(expected))
        held = len({page for (page, _), holds in expected.items() if holds})
        if self.available != self.pages - held or sum(self._count.values()) != self.pages:
            raise AccountingError(
                f"{self.available} pages available and {held} held of {self.pages}; by state {self._count}"
            )

    def _difference(self, expected: Mapping[tuple[int, Hold], int]) -> str:
        """The first page and kind whose holds differ from the records."""
        for page in range(self.pages):
            for kind in Hold:
                holds, want = self._holds_of(page, kind), expected.get((page, kind), 0)
                if holds != want:
                    return f"page {page}: {holds} holds of {kind.name}, {want} accounted for"
        return f"{self._total_holds} holds counted, {sum(expected.values())} accounted for"

    def _holds_of(self, page: int, kind: Hold) -> int:
        return self._holds[page] >> (_BITS * kind) & _MOST

    def _take_hold(self, page: int, hold: Hold) -> PageState:
        """Take one hold of a page; returns the state that it had, as one of which it still counts."""
        state = self.state(page)
        if not self._holds_of(page, hold):
            raise IllegalTransition(f"page {page} ({state}) has no hold of {hold.name}")
        self._holds[page] -= _ONE[hold]
        self._total_holds -= 1
        return state

    def _add_hold(self, page: int, state: PageState, hold: Hold) -> None:
        """Give a page, which counts as one of this state, one more hold."""
        if self._holds_of(page, hold) == _MOST:
            raise AccountingError(f"page {page}: more than {_MOST} holds of {hold.name}")
        self._holds[page] += _ONE[hold]
        self._total_holds += 1
        self._count[state] -= 1
        self._count[_state_of(self._holds[page])] += 1


def _state_of(holds: int) -> PageState:
    """The state of a page with holds: the strongest kind of them."""
    return _STATE_OF_HOLD[(holds.bit_length() - 1) // _BITS]
