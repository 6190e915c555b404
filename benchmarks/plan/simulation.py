"""A discrete-event simulation of a plan: every request, every prefill worker, every decode batch.

The life of a request is that of the real system: it reserves a place on the decode worker with most room, or
waits for one at the door; only then it queues for prefill, is computed at batch 1, is handed over, and joins
the batch at the next step. A first token is the end of the first decode step.

A decode worker's steps between two changes of its batch are all alike and become one event, so that minutes
of thousands of GPUs take seconds: a request costs about five events whatever its length.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.benchmarks.serve.statistics import Summary, summarise


class StepTime(Protocol):
    """Time of a decode step."""

    def __call__(self, batch: int, context_tokens: float) -> float:
        """Seconds of a step of ``batch`` sequences that hold ``context_tokens`` tokens together."""
        ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated; times in seconds."""

    prefill_workers: int
    decode_workers: int
    places: int
    """Sequences that one decode worker takes at one time."""
    prefill_s: Callable[[int], float]
    """Of a prompt's tokens."""
    handover_s: Callable[[int], float]
    step_s: StepTime
    prefill_gpus: int = 1
    decode_gpus: int = 1
    """GPUs of one worker."""


@dataclass(slots=True)
class Request:
    """One request; times in seconds since the start."""

    arrives_s: float
    input_tokens: int
    output_tokens: int
    wait_place_s: float = 0.0
    wait_prefill_s: float = 0.0
    first_s: float = math.nan
    ended_s: float = math.nan

    @property
    def ttft_s(self) -> float:
        """Arrival to the end of the first decode step."""
        return self.first_s - self.arrives_s


@dataclass(frozen=True, slots=True)
class Patience:
    """When a simulation has seen enough: more than ``late`` requests had a TTFT above ``ttft_s``."""

    ttft_s: float
    late: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load, warm-up left out."""

    requests: int
    ttft: Summary
    itl: Summary
    wait_place: Summary
    wait_prefill: Summary
    prefill_utilisation: float
    decode_mean_batch: float
    decode_utilisation: float
    """Mean share of places in use."""
    output_tokens_per_s: float
    simulated_s: float
    given_up: bool = False
    """Whether it ended early, out of patience: all figures are of what came before."""


@dataclass(slots=True)
class _Decode:
    """One decode worker; ``steps`` counts the steps it has ended."""

    index: int
    steps: int = 0
    context: float = 0.0
    """Tokens that the running sequences hold together."""
    began_s: float = 0.0
    """When the present run of equal steps began."""
    step_s: float = 0.0
    version: int = 0
    joining: list[Request] = field(default_factory=list)
    running: list[tuple[int, int, Request]] = field(default_factory=list)
    """Heap of (step count at the end, tie breaker, request)."""


class _Room:
    """Workers by how many places are taken; the least loaded one at constant cost."""

    def __init__(self, workers: int, places: int) -> None:
        self._taken = [0] * workers
        self._by_taken: list[dict[int, None]] = [{} for _ in range(places + 1)]
        self._by_taken[0] = dict.fromkeys(range(workers))
        self._least = 0

    def most(self) -> int | None:
        """The worker with most room, None when every place is taken."""
        while self._least < len(self._by_taken) and not self._by_taken[self._least]:
            self._least += 1
        return None if self._least >= len(self._by_taken) - 1 else next(iter(self._by_taken[self._least]))

    def take(self, worker: int) -> None:
        """One place fewer."""
        self._move(worker, 1)

    def give_back(self, worker: int) -> None:
        """One place more."""
        self._move(worker, -1)

    def _move(self, worker: int, by: int) -> None:
        del self._by_taken[self._taken[worker]][worker]
        self._taken[worker] += by
        self._by_taken[self._taken[worker]][worker] = None
        self._least = min(self._least, self._taken[worker])


class Simulation:
    """Runs requests through a cluster."""

    def __init__(self, cluster: Cluster, warmup_s: float = 0.0, patience: Patience | None = None) -> None:
        self._cluster, self._warmup_s = cluster, warmup_s
        self._longest_ttft_s = math.inf if patience is None else patience.ttft_s
        self._patience = math.inf if patience is None else patience.late
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._decodes = [_Decode(index) for index in range(cluster.decode_workers)]
        self._room = _Room(cluster.decode_workers, cluster.places)
        self._free_at = [0.0] * cluster.prefill_workers
        self._door: deque[Request] = deque()
        self._done: list[Request] = []
        self._gaps: dict[float, int] = {}
        self._prefill_busy_s = self._batch_seconds = 0.0
        self._tokens = 0
        self._now = self._last_arrival_s = 0.0
        self._open = True
        """Whether requests still arrive; the emptying afterwards is left out of the rates."""

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Simulate until every request has been answered, or patience ends.

        ``requests`` come in the order of arrival.
        """
        arrivals = iter(requests)
        self._next_arrival(arrivals)
        while self._events and self._patience >= 0:
            self._now, _, act = heapq.heappop(self._events)
            act(self._now)
        return self._outcome()

    # ---------------------------------------------------------------------------------------------- the door

    def _next_arrival(self, arrivals: Iterable[Request]) -> None:
        """Only the next arrival is in the heap, so that a long load needs no memory."""
        request = next(iter(arrivals), None)
        if request is None:
            self._open = False
            return

        def arrive(now: float) -> None:
            self._last_arrival_s = now
            self._next_arrival(arrivals)
            index = self._room.most()
            if index is None:
                self._door.append(request)
            else:
                self._reserve(request, self._decodes[index], now)

        self._at(request.arrives_s, arrive)

    def _reserve(self, request: Request, worker: _Decode, now: float) -> None:
        self._room.take(worker.index)
        request.wait_place_s = now - request.arrives_s
        start_s = max(now, heapq.heappop(self._free_at))
        request.wait_prefill_s = start_s - now
        busy_s = self._cluster.prefill_s(request.input_tokens)
        heapq.heappush(self._free_at, start_s + busy_s)
        if request.arrives_s >= self._warmup_s:
            self._prefill_busy_s += busy_s
        arrives_s = start_s + busy_s + self._cluster.handover_s(request.input_tokens)
        self._at(arrives_s, lambda when: self._join(request, worker, when))

    # ------------------------------------------------------------------------------------------------ decode

    def _join(self, request: Request, worker: _Decode, now: float) -> None:
        """The KV is there: the sequence enters the batch at the end of the step under way."""
        worker.joining.append(request)
        if not worker.running:
            self._change(worker, now)
        elif len(worker.joining) == 1:
            ended = max(0, math.ceil((now - worker.began_s) / worker.step_s - 1e-9))
            self._plan_change(worker, worker.began_s + ended * worker.step_s)

    def _change(self, worker: _Decode, now: float) -> None:
        """A step has ended at which the batch changes: count what was done, let in and out, go on."""
        self._advance(worker, now)
        while worker.running and worker.running[0][0] <= worker.steps:
            _, _, request = heapq.heappop(worker.running)
            worker.context -= request.input_tokens + request.output_tokens
            self._finish(request, worker, now)
        entering, worker.joining = worker.joining, []
        for request in entering:
            worker.context += request.input_tokens
            end = worker.steps + request.output_tokens
            heapq.heappush(worker.running, (end, next(self._order), request))
        if not worker.running:
            worker.version += 1
            return
        worker.began_s = now
        worker.step_s = self._cluster.step_s(len(worker.running), worker.context)
        for request in entering:
            request.first_s = now + worker.step_s
            if request.ttft_s > self._longest_ttft_s and request.arrives_s >= self._warmup_s:
                self._patience -= 1
        self._plan_change(worker, now + (worker.running[0][0] - worker.steps) * worker.step_s)

    def _plan_change(self, worker: _Decode, when_s: float) -> None:
        worker.version += 1
        version = worker.version

        def change(now: float) -> None:
            if worker.version == version:
                self._change(worker, now)

        self._at(when_s, change)

    def _advance(self, worker: _Decode, now: float) -> None:
        """Count the equal steps since ``began_s``."""
        batch = len(worker.running)
        if not batch:
            return
        steps = round((now - worker.began_s) / worker.step_s)
        worker.steps += steps
        worker.context += batch * steps
        if self._open and now >= self._warmup_s:
            self._batch_seconds += batch * steps * worker.step_s
            # A sequence's first step ends its TTFT and is no gap; that is one step per request of thousands.
            key = float(f"{worker.step_s:.3g}")
            self._gaps[key] = self._gaps.get(key, 0) + batch * steps
            self._tokens += batch * steps

    def _finish(self, request: Request, worker: _Decode, now: float) -> None:
        request.ended_s = now
        self._done.append(request)
        self._room.give_back(worker.index)
        if self._door:
            self._reserve(self._door.popleft(), worker, now)

    # --------------------------------------------------------------------------------------------- reporting

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), act))

    def _outcome(self) -> Outcome:
        counted = [each for each in self._done if each.arrives_s >= self._warmup_s]
        span_s = max(1e-9, self._last_arrival_s - self._warmup_s)
        places = self._cluster.decode_workers * self._cluster.places
        return Outcome(
            requests=len(counted),
            ttft=summarise([each.ttft_s for each in counted]),
            itl=weighted_summary(self._gaps),
            wait_place=summarise([each.wait_place_s for each in counted]),
            wait_prefill=summarise([each.wait_prefill_s for each in counted]),
            prefill_utilisation=self._prefill_busy_s / (span_s * self._cluster.prefill_workers),
            decode_mean_batch=self._batch_seconds / (span_s * self._cluster.decode_workers),
            decode_utilisation=self._batch_seconds / (span_s * places),
            output_tokens_per_s=self._tokens / span_s,
            simulated_s=self._now,
            given_up=self._patience < 0,
        )


def requests_at(
    times: Iterable[float],
    duration_s: float,
    input_tokens: Callable[[random.Random], int],
    output_tokens: Callable[[random.Random], int],
    seed: int,
) -> Iterable[Request]:
    """Requests at ``times`` until ``duration_s``, with lengths drawn for each."""
    rng = random.Random(seed)
    for arrives_s in times:
        if arrives_s > duration_s:
            return
        yield Request(arrives_s, input_tokens(rng), output_tokens(rng))


def weighted_summary(counts: dict[float, int]) -> Summary:
    """Summary of values that occurred so many times; quantiles are the nearest rank."""
    total = sum(counts.values())
    if not total:
        return Summary(0, None, None, None, None, None, None)
    ordered = sorted(counts)
    quantiles, passed, index = [], counts[ordered[0]], 0
    for quantile in (0.5, 0.9, 0.95, 0.99):
        while passed < quantile * total:
            index += 1
            passed += counts[ordered[index]]
        quantiles.append(ordered[index])
    mean = sum(value * count for value, count in counts.items()) / total
    p50, p90, p95, p99 = quantiles
    return Summary(total, mean, p50, p90, p95, p99, ordered[-1])
