"""What the router believes about the workers' prefix caches.

The router never asks: it remembers which prompts it sent where, in whole pages, and forgets the least
recently used ones. A wrong belief costs a recompute, never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def page_keys(token_ids: Sequence[int], page_size_tokens: int, salt: str = "") -> list[bytes]:
    """One key per whole page; a key names the page and everything before it.

    The last token is never part of a cached prefix (it is always computed by decode), so a prompt of exactly
    one page has no key.
    """
    keys: list[bytes] = []
    previous = salt.encode()
    packed = memoryview(array("I", token_ids).tobytes())
    step = 4 * page_size_tokens
    for start in range(0, 4 * max(len(token_ids) - 1, 0) - step + 1, step):
        previous = hashlib.blake2b(previous + packed[start : start + step], digest_size=16).digest()
        keys.append(previous)
    return keys


class PrefixIndex:
    """Bounded memory of page keys per worker life."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity_pages = capacity_pages
        self._pages: dict[str, OrderedDict[bytes, None]] = {}

    def cached_pages(self, worker_id: str, keys: Sequence[bytes]) -> int:
        """How many leading pages the worker is believed to hold."""
        held = self._pages.get(worker_id)
        if not held:
            return 0
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def record(self, worker_id: str, keys: Sequence[bytes]) -> None:
        """The worker holds these pages now, and used them last."""
        held = self._pages.setdefault(worker_id, OrderedDict())
        # Later pages first, so that the beginning of a prompt outlives its end, as in the workers' caches.
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._capacity_pages:
            held.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """The worker's cache is gone."""
        self._pages.pop(worker_id, None)
