"""Prefixes are found in both groups or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from antiphon.engine.pages import Hold, PagePool
from antiphon.engine.prefix_cache import PrefixCache, chain_root, page_key, window_first_page
from antiphon.engine.sequence import Sequence

PAGE, WINDOW = 16, 24


def _filled(pages: int) -> tuple[PrefixCache, PagePool, PagePool, list[bytes]]:
    """A cache that has seen one prompt of ``pages`` whole pages, which nobody holds any more."""
    full, sliding = PagePool(pages), PagePool(pages)
    cache = PrefixCache(full, sliding, page_size=PAGE, window=WINDOW, enabled=True)
    keys = []
    previous = chain_root("")
    for page in range(pages):
        previous = page_key(previous, range(page * PAGE, (page + 1) * PAGE))
        keys.append(previous)
    for pool, is_sliding in ((full, False), (sliding, True)):
        held = pool.allocate(pages, Hold.USED)
        cache.publish(keys, held, sliding=is_sliding)
        pool.drop(held, Hold.USED)
    return cache, full, sliding, keys


def test_the_longest_prefix_is_found_with_its_sliding_tail() -> None:
    cache, full, sliding, keys = _filled(6)
    hit = cache.longest_hit(keys)
    assert hit.tokens == 96
    assert [full.lookup(key) for key in keys] == list(hit.full)
    # 24 positions before 96 begin at 72, in logical page 4.
    assert hit.sliding_first == 4
    assert [sliding.lookup(key) for key in keys[4:]] == list(hit.sliding)


def test_without_the_sliding_tail_the_cut_moves_back() -> None:
    cache, _, sliding, keys = _filled(6)
    gone = sliding.lookup(keys[4])
    while True:  # evict until the fifth page's sliding keys are gone
        (page,) = sliding.allocate(1, Hold.USED)
        if page == gone:
            break
    # Eviction took the pages 0 .. 4 in the order in which they were dropped; only page 5 is left.
    assert cache.longest_hit(keys).tokens == 0


def test_sliding_pages_before_the_tail_do_not_matter() -> None:
    cache, _, sliding, keys = _filled(6)
    sliding.allocate(4, Hold.USED)  # pages 0 .. 3 were left longest ago
    assert cache.longest_hit(keys).tokens == 96
    assert cache.longest_hit(keys[:5]).tokens == 0


def test_a_full_page_that_is_gone_ends_the_prefix() -> None:
    cache, full, _, keys = _filled(6)
    full.allocate(1, Hold.USED)
    assert cache.longest_hit(keys).tokens == 0


def test_no_more_keys_are_asked_for_than_are_found_and_one() -> None:
    cache, _, _, keys = _filled(6)
    asked: list[bytes] = []

    def each(names: list[bytes]) -> Iterator[bytes]:
        for name in names:
            asked.append(name)
            yield name

    assert cache.longest_hit(each([*keys[:3], b"unknown", *keys[3:]])).tokens == 48
    assert asked == [*keys[:3], b"unknown"]
    assert cache.longest_hit(each(keys)).tokens == 96


def test_a_key_stands_for_everything_before_it() -> None:
    same = list(range(PAGE))
    assert page_key(page_key(chain_root(""), same), same) != page_key(chain_root(""), same)
    assert chain_root("a") != chain_root("")
    assert page_key(chain_root(""), [1, 2]) != page_key(chain_root(""), [2, 1])


def test_a_cache_that_is_off_finds_nothing() -> None:
    full, sliding = PagePool(1), PagePool(1)
    cache = PrefixCache(full, sliding, page_size=PAGE, window=WINDOW, enabled=False)
    held = full.allocate(1, Hold.USED)
    cache.publish([b"k"], held, sliding=False)
    assert full.lookup(b"k") is None
    assert cache.longest_hit([b"k"]).tokens == 0


@pytest.mark.parametrize(("position", "first"), [(0, 0), (24, 0), (39, 0), (40, 1), (41, 1), (56, 2)])
def test_window_first_page(position: int, first: int) -> None:
    assert window_first_page(position, WINDOW, PAGE) == first


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(kit: Any) -> None:
    loop = kit.loop(full_pages=8)
    loop.submit(kit.request("long", kit.prompt_of(96), max_tokens=1))
    kit.run(loop)
    pages = loop._ledger.pages
    keys = Sequence(kit.request("x", kit.prompt_of(96)), 1, 0.0).page_keys(6, 16)
    pages.full.allocate(pages.full.available - 4, Hold.USED)
    assert [pages.full.lookup(key) is not None for key in keys] == [True] * 4 + [False] * 2


def test_what_fell_out_of_the_window_is_evicted_before_the_ends_of_prompts(kit: Any) -> None:
    loop = kit.loop(sliding_pages=8)
    loop.submit(kit.request("first", kit.prompt_of(65), max_tokens=1))
    kit.run(loop)
    # A long prompt leaves ten sliding pages behind; the tail that "first" ended with must outlive them.
    loop.submit(kit.request("second", kit.prompt_of(200, 1), max_tokens=1))
    kit.run(loop)
    loop.submit(kit.request("third", (*kit.prompt_of(65), 1, 2, 3), max_tokens=1))
    kit.run(loop)
    assert loop.snapshot().prefix_hit_tokens == 64
