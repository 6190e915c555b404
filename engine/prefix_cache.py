"""Which pages of a prompt are already in the cache, in both groups at once.

The key of logical page i is a hash over the key of page i - 1 and the page's tokens, so a key stands for the
whole prefix up to the page's end; the chain starts at the request's ``cache_salt``. Only whole pages have
keys.

A prefix of k pages is a hit when full pages 0 .. k-1 are cached and so is its sliding tail: the sliding pages
that hold the ``window`` positions before the cut. The sliding pages before the tail are not needed by any
query behind the cut, so it does not matter whether they are still there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.engine.pages import PagePool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix: ``full`` are its pages from logical 0, ``sliding`` those from ``sliding_first``."""

    tokens: int
    full: tuple[int, ...]
    sliding: tuple[int, ...]
    sliding_first: int


def window_first_page(position: int, window: int, page_size: int) -> int:
    """The first logical page that the ``window`` positions before ``position`` touch."""
    return max(0, position - window) // page_size


def chain_root(cache_salt: str) -> bytes:
    """The start of a chain of page keys."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"antiphon-prefix").digest()


def page_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a page that follows the prefix ``previous`` and holds ``token_ids``."""
    ids = token_ids if isinstance(token_ids, array) else array("q", token_ids)
    return hashlib.blake2b(previous + ids.tobytes(), digest_size=16).digest()


class PrefixCache:
    """Finds and publishes prefixes in the pools of the two groups; owns no page itself."""

    def __init__(
        self, full: PagePool, sliding: PagePool, *, page_size: int, window: int, enabled: bool
    ) -> None:
        self._full = full
        self._sliding = sliding
        self._page_size = page_size
        self._window = window
        self.enabled = enabled

    def longest_hit(self, keys: Iterable[bytes]) -> PrefixHit:
        """The longest usable prefix of a chain of keys, of which it takes no more than are found and one;
        takes no hold."""
        run: list[int] = []
        found_keys: list[bytes] = []
        for key in keys if self.enabled else ():
            page = self._full.lookup(key)
            if page is None:
                break
            run.append(page)
            found_keys.append(key)
        for pages in range(len(run), 0, -1):
            first = window_first_page(pages * self._page_size, self._window, self._page_size)
            tail = [self._sliding.lookup(key) for key in found_keys[first:pages]]
            found = tuple(page for page in tail if page is not None)
            if len(found) == len(tail):
                return PrefixHit(pages * self._page_size, tuple(run[:pages]), found, first)
        return PrefixHit(0, (), (), 0)

    def publish(self, keys: Sequence[bytes], pages: Sequence[int], *, sliding: bool) -> None:
        """Make complete, held pages findable; ``keys[i]`` names the content of ``pages[i]``."""
        if not self.enabled:
            return
        pool = self._sliding if sliding else self._full
        pool.publish(pages, keys)
