"""The door: how many choices run at one time, how many may wait, and who is turned away."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from antiphon.protocol.errors import AntiphonError
from antiphon.router.metrics import RouterMetrics


class QueueFull(AntiphonError):
    """The bounded queue has no place; ``retry_after_s`` is when one can be expected."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the queue of waiting requests is full")
        self.retry_after_s = retry_after_s


class DeadlineTooClose(AntiphonError):
    """The request cannot end in time: nothing is spent on it. ``retry_after_s`` is when it has a chance."""

    def __init__(self, needed_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(f"at least {needed_s:.1f} s would pass before its end, and it has {left_s:.1f} s")
        self.retry_after_s = retry_after_s


class ShuttingDown(AntiphonError):
    """The router takes nothing new."""


class AdmissionTimeout(AntiphonError):
    """The deadline passed while the request waited."""


REMEMBERED_HOLDS = 64
"""So many requests tell how long one takes at least."""


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    arrival: int
    weight: int = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)
    displaced: bool = field(default=False, compare=False)
    """Its place is somebody else's, though it has not heard of it."""


class Admission:
    """Slots for choices, with a bounded queue in front. Smaller priorities first, then by arrival.

    A request of n choices takes n slots at once, and never more than there are in all. With the queue full, a
    request takes the place of those behind it, the last of the lowest priority first.
    """

    def __init__(self, max_in_flight: int, max_queued: int, metrics: RouterMetrics) -> None:
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._metrics = metrics
        self._in_flight = 0
        self._queued = 0
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_hold_s = 1.0
        self._holds_s: deque[float] = deque(maxlen=REMEMBERED_HOLDS)
        """How long slots were held lately."""

    @property
    def in_flight(self) -> int:
        """Slots taken."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Slots waited for."""
        return self._queued

    @asynccontextmanager
    async def slots(self, weight: int, priority: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold ``weight`` slots.

        Raises:
            QueueFull: there is no place to wait, or somebody more urgent took it.
            DeadlineTooClose: ``timeout_s`` is less than what it would take.
            AdmissionTimeout: nothing became free within ``timeout_s``.
            ShuttingDown: the router takes nothing new.
        """
        weight = min(weight, self._max_in_flight)
        await self._enter(weight, priority, timeout_s)
        entered = time.monotonic()
        try:
            yield
        finally:
            held_s = time.monotonic() - entered
            self._holds_s.append(held_s)
            self._mean_hold_s += 0.1 * (held_s - self._mean_hold_s)
            self._in_flight -= weight
            self._admit_waiters()

    def check(self, weight: int, priority: int, timeout_s: float) -> None:
        """Whether ``slots`` would turn such a request away now, before anything is spent on it.

        Raises:
            QueueFull, DeadlineTooClose, ShuttingDown: as ``slots`` does.
        """
        weight = min(weight, self._max_in_flight)
        if self._closed:
            self._metrics.rejections.labels("shutdown").inc()
            raise ShuttingDown("the server is shutting down")
        if self._has_room(weight):
            needed_s = self._shortest_hold_s()
        else:
            behind = sum(w.weight for w in self._waiters if w.priority > priority and not w.admitted.done())
            if self._queued - behind + weight > self._max_queued:
                self._metrics.rejections.labels("queue_full").inc()
                raise QueueFull(self._expected_wait_s(self._queued + weight))
            wait_s = self._mean_hold_s * (self._queued - behind + weight) / self._max_in_flight
            needed_s = wait_s + self._shortest_hold_s() if self._holds_s else 0.0
        if needed_s > timeout_s:
            self._metrics.rejections.labels("deadline").inc()
            raise DeadlineTooClose(needed_s, timeout_s, self._expected_wait_s(self._queued + weight))

    def close(self) -> None:
        """Turn away everyone who comes or waits from now on; those inside keep their slots."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(ShuttingDown("the server is shutting down"))
        self._waiters.clear()

    async def wait_idle(self) -> None:
        """Return once nobody holds or waits for a slot."""
        await self._idle.wait()

    async def _enter(self, weight: int, priority: int, timeout_s: float) -> None:
        self.check(weight, priority, timeout_s)
        if self._has_room(weight):
            self._in_flight += weight
            self._show()
            return
        self._displace(weight, priority)
        waiter = _Waiter(priority, next(self._arrivals), weight, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self._queued += weight
        self._show()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.admitted
        except BaseException as error:
            self._leave_queue(waiter)
            if isinstance(error, TimeoutError):
                raise AdmissionTimeout(
                    "the deadline passed while the request waited to be admitted"
                ) from None
            raise
        self._queued -= weight
        self._show()

    def _has_room(self, weight: int) -> bool:
        return not self._queued and self._in_flight + weight <= self._max_in_flight

    def _displace(self, weight: int, priority: int) -> None:
        """Turn away waiters behind ``priority``, the last first, until there is a place to wait."""
        excess = self._queued + weight - self._max_queued
        for waiter in sorted(self._waiters, reverse=True):
            if excess <= 0 or waiter.priority <= priority:
                return
            if not waiter.admitted.done():
                excess -= waiter.weight
                self._queued -= waiter.weight
                waiter.displaced = True
                self._metrics.rejections.labels("displaced").inc()
                waiter.admitted.set_exception(QueueFull(self._expected_wait_s(self._queued)))

    def _shortest_hold_s(self) -> float:
        """A low estimate of how long a request holds its slot: a tenth of the late ones were faster."""
        return sorted(self._holds_s)[len(self._holds_s) // 10] if self._holds_s else 0.0

    def _leave_queue(self, waiter: _Waiter) -> None:
        if not waiter.displaced:
            self._queued -= waiter.weight
        if waiter.admitted.done() and not waiter.admitted.cancelled() and not waiter.admitted.exception():
            # Admitted in the same moment as it gave up: hand the slots on.
            self._in_flight -= waiter.weight
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            heapq.heapify(self._waiters)
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiters and self._in_flight + self._waiters[0].weight <= self._max_in_flight:
            waiter = heapq.heappop(self._waiters)
            if not waiter.admitted.done():
                self._in_flight += waiter.weight
                waiter.admitted.set_result(None)
        self._show()

    def _expected_wait_s(self, weight: int) -> float:
        """When the queue should have drained by ``weight``, from how long slots are held; 1 to 60 s."""
        return min(max(math.ceil(self._mean_hold_s * weight / self._max_in_flight), 1), 60)

    def _show(self) -> None:
        if self._in_flight or self._queued:
            self._idle.clear()
        else:
            self._idle.set()
        self._metrics.requests_in_flight.set(self._in_flight)
        self._metrics.requests_queued.set(self._queued)
