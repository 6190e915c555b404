"""The page pool: states, holds and the account."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from antiphon.engine import pages
from antiphon.engine.pages import AccountingError, Hold, PagePool, PageState
from antiphon.protocol.errors import IllegalTransition


def test_free_pages_go_first_then_the_one_left_longest_ago() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3, Hold.USED)
    for page in pages:
        pool.publish([page], [bytes([page])])
    pool.drop([pages[2], pages[0]], Hold.USED)
    assert pool.available == 3
    assert pool.allocate(2, Hold.USED)[1] == pages[2]
    assert pool.lookup(bytes([pages[2]])) is None
    assert pool.lookup(bytes([pages[0]])) == pages[0]


def test_cold_pages_are_evicted_before_all_others() -> None:
    pool = PagePool(2)
    old, young = pool.allocate(2, Hold.USED)
    pool.publish([old], [b"old"])
    pool.publish([young], [b"young"])
    pool.drop([old], Hold.USED)
    pool.drop([young], Hold.USED, cold=True)
    assert pool.allocate(1, Hold.USED) == [young]


def test_a_shared_page_returns_only_with_its_last_hold() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1, Hold.USED)
    pool.publish([page], [b"k"])
    pool.share([page])
    pool.drop([page], Hold.USED)
    assert pool.state(page) is PageState.USED
    assert pool.available == 0
    pool.drop([page], Hold.USED)
    assert pool.state(page) is PageState.CACHED
    pool.share([page])
    assert pool.state(page) is PageState.USED


def test_the_strongest_hold_is_the_state() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1, Hold.USED)
    pool.share([page], Hold.PINNED)
    assert pool.state(page) is PageState.PINNED
    pool.quarantine([page])
    assert pool.state(page) is PageState.QUARANTINED
    pool.drop([page], Hold.QUARANTINED)
    pool.drop([page], Hold.PINNED)
    assert pool.counts()[PageState.USED] == 1
    pool.drop([page], Hold.USED)
    assert pool.counts()[PageState.FREE] == 1


def test_a_page_that_a_peer_may_write_is_neither_shared_nor_published() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1, Hold.RESERVED)
    with pytest.raises(IllegalTransition, match="reserved"):
        pool.share([page])
    with pytest.raises(IllegalTransition, match="reserved"):
        pool.publish([page], [b"k"])
    pool.convert([page], Hold.RESERVED, Hold.USED)
    pool.publish([page], [b"k"])
    assert pool.lookup(b"k") == page


def test_illegal_moves_raise() -> None:
    pool = PagePool(2)
    with pytest.raises(IllegalTransition, match="no hold of USED"):
        pool.drop([0], Hold.USED)
    with pytest.raises(IllegalTransition, match="no hold of RESERVED"):
        pool.convert([0], Hold.RESERVED, Hold.USED)
    with pytest.raises(IllegalTransition, match="free"):
        pool.share([0])
    with pytest.raises(IllegalTransition, match="free"):
        pool.publish([0], [b"k"])
    with pytest.raises(IllegalTransition, match="free"):
        pool.quarantine([0])
    (page,) = pool.allocate(1, Hold.USED)
    pool.publish([page], [b"k"])
    with pytest.raises(IllegalTransition, match="other content"):
        pool.publish([page], [b"other"])
    with pytest.raises(AccountingError, match="2 pages asked for, 1 available"):
        pool.allocate(2, Hold.USED)


def test_the_first_page_of_equal_content_keeps_the_key() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2, Hold.USED)
    pool.publish([first], [b"k"])
    pool.publish([second], [b"k"])
    assert pool.lookup(b"k") == first
    pool.drop([second], Hold.USED)
    assert pool.state(second) is PageState.FREE


def test_the_account_finds_what_is_missing_and_what_is_too_much() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1, Hold.USED)
    pool.check({(page, Hold.USED): 1})
    with pytest.raises(AccountingError, match=f"page {page}"):
        pool.check({})
    with pytest.raises(AccountingError, match=f"page {page}"):
        pool.check({(page, Hold.USED): 2})
    with pytest.raises(AccountingError):
        pool.check({(page, Hold.PINNED): 1})


def test_forgotten_content_is_not_found_again() -> None:
    pool = PagePool(2)
    held, left = pool.allocate(2, Hold.USED)
    pool.publish([held], [b"held"])
    pool.publish([left], [b"left"])
    pool.drop([left], Hold.USED)
    pool.forget([held, left])
    assert pool.lookup(b"held") is None
    assert pool.lookup(b"left") is None
    assert (pool.state(held), pool.state(left)) == (PageState.USED, PageState.FREE)
    pool.check({(held, Hold.USED): 1})


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_moves_keeps_states_counts_and_account(seed: int) -> None:
    """Against records of who holds what: the state is the strongest kind of hold, wherever it comes from."""
    rng = random.Random(seed)
    pool, held, keys = PagePool(12), Counter[tuple[int, Hold]](), 0
    strongest = {
        Hold.USED: PageState.USED,
        Hold.RESERVED: PageState.RESERVED,
        Hold.PINNED: PageState.PINNED,
        Hold.QUARANTINED: PageState.QUARANTINED,
    }
    named: dict[int, bytes] = {}
    for _ in range(400):
        move = rng.choice(["allocate", "share", "convert", "drop", "publish", "quarantine", "forget"])
        pages = sorted({page for page, _ in held})
        some = rng.sample(pages, min(len(pages), rng.randint(1, 4)))
        hold, other = rng.choice(list(Hold)), rng.choice(list(Hold))
        with_hold = [page for page in some if held[page, hold]]
        if move == "allocate":
            count = rng.randint(0, min(5, pool.available))
            for page in pool.allocate(count, hold):
                assert not any(held[page, kind] for kind in Hold)
                named.pop(page, None)
                held[page, hold] += 1
        elif move == "share":
            page = rng.randrange(pool.pages)
            if pool.state(page) in (PageState.FREE, PageState.RESERVED):
                with pytest.raises(IllegalTransition, match="cannot be shared"):
                    pool.share([page], hold)
            else:
                pool.share([page], hold)
                held[page, hold] += 1
        elif move == "convert":
            pool.convert(with_hold, hold, other)
            held.subtract((page, hold) for page in with_hold)
            held.update((page, other) for page in with_hold)
        elif move == "drop":
            pool.drop(with_hold, hold, cold=rng.random() < 0.5)
            held.subtract((page, hold) for page in with_hold)
        elif move == "publish":
            fine = [page for page in some if pool.state(page) is not PageState.RESERVED and page not in named]
            names = [str(keys + i).encode() for i in range(len(fine))]
            keys += len(fine)
            pool.publish(fine, names)
            named |= dict(zip(fine, names, strict=True))
        elif move == "quarantine":
            pool.quarantine(some)
            held.update((page, Hold.QUARANTINED) for page in some)
        else:
            pool.forget(some)
            for page in some:
                named.pop(page, None)
        held = +held
        pool.check(held)
        states = Counter[PageState]()
        for page in range(pool.pages):
            kinds = [kind for kind in Hold if held[page, kind]]
            state = pool.state(page)
            unheld = PageState.CACHED if page in named else PageState.FREE
            assert state is (strongest[max(kinds)] if kinds else unheld)
            states[state] += 1
        assert pool.counts() == {state.value: states[state] for state in PageState}
        for page, name in named.items():
            assert pool.lookup(name) == page


def test_a_hold_that_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST", 3)
    pool = PagePool(1)
    (page,) = pool.allocate(1, Hold.USED)
    for _ in range(2):
        pool.share([page])
    with pytest.raises(AccountingError, match="more than 3 holds of USED"):
        pool.share([page])
