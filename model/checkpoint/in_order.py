"""``map`` in several threads, a bounded number of results ahead of whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    ahead: int,
    name: str = "map-in-order",
) -> Iterator[Result]:
    """Results in the order of the items, computed in threads while earlier results are being used.

    Nothing is computed before the first is asked for; items that were not begun are left when the iterator
    is closed or a call raises.

    Args:
        ahead: results that are computed or wait at any time, at most. Where some take far longer than others,
            several times the threads, so that these find work while one is waited for.
        name: of the threads.

    Raises:
        whatever ``function`` raised, at the place of its result.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                if len(waiting) == ahead:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
