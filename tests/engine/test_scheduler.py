"""The scheduler's policy, on plain data: no model, no tensors, no threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.engine.allocation import SequencePages
from antiphon.engine.pages import Hold
from antiphon.engine.requests import RequestKind
from antiphon.engine.scheduler import Scheduler, StepPlan
from antiphon.engine.sequence import Sequence, SequenceStatus

REMOTE, PREFILL = RequestKind.REMOTE_KV, RequestKind.PREFILL_ONLY


class Desk:
    """A scheduler, and a step that computes nothing and samples token 1."""

    def __init__(self, kit: Any, **changes: Any) -> None:
        self.kit = kit
        settings = kit.settings(prefix_cache=False, **changes)
        self.pages = SequencePages(settings)
        self.scheduler = Scheduler(settings, self.pages)
        self.arrivals = 0

    def queue(self, name: str, length: int, **more: Any) -> Sequence:
        """A new request in the queue."""
        self.arrivals += 1
        request = self.kit.request(name, self.kit.prompt_of(length), **{"max_tokens": 500, **more})
        sequence = Sequence(request, self.arrivals, 0.0)
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Plan, pretend to compute, sample."""
        plan = self.scheduler.schedule()
        self.pages.retire(plan.step or self.pages.retired_step)
        for work in plan.work:
            self.scheduler.complete(work)
            if work.samples:
                work.sequence.token_ids.append(1)
        return plan


@pytest.fixture
def desk(kit: Any) -> Callable[..., Desk]:
    return lambda **changes: Desk(kit, **changes)


def _said(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(work.sequence.request.request_id, work.start, work.count) for work in plan.work]


def test_decodes_and_chunks_share_a_step(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.queue("a", 10)
    d.step()
    d.queue("b", 100)
    assert _said(d.step()) == [("a", 10, 1), ("b", 0, 32)]
    assert _said(d.step()) == [("a", 11, 1), ("b", 32, 32)]


def test_sequences_with_one_token_come_first_in_a_step(desk: Callable[..., Desk]) -> None:
    """Whoever came first: kernels of one query a sequence take the front of a step."""
    d = desk()
    d.queue("a", 200)
    b = d.queue("b", 10, kind=REMOTE)
    while b.status is not SequenceStatus.RESERVED:
        d.step()
    d.scheduler.receive(b)
    assert [(name, count) for name, _, count in _said(d.step())] == [("b", 1), ("a", 32)]


def test_prompts_share_the_budget_of_a_step(desk: Callable[..., Desk]) -> None:
    d = desk()
    for name in "abc":
        d.queue(name, 20)
    assert _said(d.step()) == [("a", 0, 20), ("b", 0, 12)]
    assert _said(d.step()) == [("a", 20, 1), ("b", 12, 8), ("c", 0, 20)]


def test_announced_chunks_are_whole(desk: Callable[..., Desk]) -> None:
    d = desk()
    a, b = d.queue("a", 41, kind=PREFILL), d.queue("b", 41, kind=PREFILL)
    c = d.queue("c", 9, kind=PREFILL)
    assert _said(d.step()) == [("a", 0, 32)]
    # 8 tokens of a are left; b's first chunk of 32 does not fit beside them, and c does not overtake b.
    assert _said(d.step()) == [("a", 32, 8)]
    assert _said(d.step()) == [("b", 0, 32)]
    assert _said(d.step()) == [("b", 32, 8), ("c", 0, 8)]
    assert {s.status for s in (a, b, c)} == {SequenceStatus.PINNED}


def test_nothing_overtakes_a_head_that_does_not_fit(desk: Callable[..., Desk]) -> None:
    d = desk(full_pages=8)
    d.queue("a", 60, kind=PREFILL)
    d.step()
    d.queue("large", 100)
    small = d.queue("small", 5)
    for _ in range(3):
        d.step()
    assert small.status is SequenceStatus.QUEUED


def test_the_victim_is_the_last_of_the_least_urgent(desk: Callable[..., Desk]) -> None:
    d = desk(full_pages=8, sliding_pages=32)
    first, second = d.queue("first", 16), d.queue("second", 16)
    d.step()
    urgent = d.queue("urgent", 16, priority=-1)
    while not (preempted := d.step().preempted):
        pass
    assert preempted == [(second, 1)]
    assert second.attempt == 2
    while len(d.scheduler.active) > 1:
        d.step()
    assert d.scheduler.active == (urgent,)
    assert d.scheduler.waiting == (first, second), "recomputation keeps the order of arrival"


def test_nothing_is_admitted_in_a_step_that_preempted(desk: Callable[..., Desk]) -> None:
    d = desk(full_pages=6, sliding_pages=32)
    d.queue("a", 30)
    late = d.queue("late", 30, priority=1)
    d.step()
    waiting = d.queue("waiting", 10)
    while not (plan := d.step()).preempted:
        assert waiting.status is SequenceStatus.QUEUED
    assert plan.preempted == [(late, 1)]
    assert plan.admitted == []
    assert d.step().admitted == [waiting], "there was room for it, and it is more urgent than the victim"


def test_a_sequence_whose_chunks_were_announced_is_never_preempted(desk: Callable[..., Desk]) -> None:
    d = desk(full_pages=8, sliding_pages=32)
    a = d.queue("a", 16, priority=-1)
    d.step()
    late = d.queue("late", 65, kind=PREFILL)
    for _ in range(200):
        d.step()
    assert late.status is SequenceStatus.PINNED
    assert a.attempt > 1, "the decode gives way to itself, since nobody else can"


def test_reservations_are_capped_but_what_is_runnable_at_once_is_not(desk: Callable[..., Desk]) -> None:
    d = desk(max_reservations_waiting=1)
    d.queue("a", 20, kind=REMOTE)
    one_token = d.queue("b", 1, kind=REMOTE)
    blocked = d.queue("c", 20, kind=REMOTE)
    d.step()
    assert one_token.status is SequenceStatus.RUNNING
    assert blocked.status is SequenceStatus.QUEUED


def test_a_reservation_covers_its_kv_its_last_token_and_headroom(desk: Callable[..., Desk]) -> None:
    d = desk()
    a = d.queue("a", 64, kind=REMOTE)  # positions 0 .. 62 from the peer, 63 here, headroom to 78
    short = d.queue("b", 64, kind=REMOTE, max_tokens=1)
    d.step()
    assert (len(a.pages.full), len(short.pages.full)) == (5, 4)
    missing = d.pages.missing(a)
    assert missing["full"] == a.pages.full[:4]
    # The window of 24 before 63 begins at 39, in logical page 2.
    assert a.pages.sliding_first == 2
    assert missing["sliding"] == a.pages.sliding[:2]


def test_no_other_prefill_starts_while_one_is_stalled(desk: Callable[..., Desk]) -> None:
    d = desk()
    announced = d.queue("announced", 100, kind=PREFILL)
    d.step()
    elsewhere = d.pages.sliding.allocate(d.pages.sliding.available - 1, Hold.USED)
    small = d.queue("small", 10, kind=PREFILL)
    for _ in range(3):
        assert d.step().is_empty
    d.pages.sliding.drop(elsewhere, Hold.USED)
    for _ in range(4):
        d.step()
    assert announced.status is small.status is SequenceStatus.PINNED


def test_the_window_is_left_behind_while_decoding(desk: Callable[..., Desk]) -> None:
    d = desk()
    a = d.queue("a", 10)
    for _ in range(150):
        d.step()
        assert len(a.pages.sliding) <= 3
        assert len(a.pages.full) == -(-a.computed_tokens // 16)


def test_a_prefill_waits_for_sliding_pages_that_its_betters_hold(desk: Callable[..., Desk]) -> None:
    d = desk(sliding_pages=5)
    better = d.queue("better", 40, priority=-1)
    d.step()
    d.step()
    announced = d.queue("announced", 100, kind=PREFILL)
    statuses = set()
    for _ in range(30):
        d.step()
        statuses.add(better.status)
    assert statuses == {SequenceStatus.RUNNING}
    assert better.attempt == 1
    assert announced.status is SequenceStatus.PREFILLING
    d.pages.release(better)
    d.scheduler.finish(better)
    for _ in range(4):
        d.step()
    assert announced.status is SequenceStatus.PINNED
