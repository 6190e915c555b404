"""Limits, order and ends of requests, seen from outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from antiphon.engine.events import TokensSampled
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import RequestKind
from antiphon.protocol.messages import FinishReason

REMOTE = RequestKind.REMOTE_KV


def test_the_number_of_waiting_reservations_is_capped(kit: Any) -> None:
    loop = kit.loop(max_reservations_waiting=2)
    for i in range(4):
        loop.submit(kit.request(f"r{i}", kit.prompt_of(20, i), kind=REMOTE))
    kit.run(loop)
    assert (loop.snapshot().awaiting_kv, loop.snapshot().waiting) == (2, 2)
    loop.abort("r0", 1)
    kit.run(loop)
    assert (loop.snapshot().awaiting_kv, loop.snapshot().waiting) == (2, 1)


def test_reservations_count_against_the_batch(kit: Any) -> None:
    loop = kit.loop(max_batch_size=3)
    for i in range(5):
        loop.submit(kit.request(f"r{i}", (1 + i,), kind=REMOTE, max_tokens=50))
    loop.step()
    assert (loop.snapshot().running, loop.snapshot().waiting) == (3, 2)


def test_priority_goes_first_and_the_order_within_it_is_kept(kit: Any) -> None:
    loop = kit.loop(max_batch_size=1)
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("urgent", -1)):
        loop.submit(kit.request(name, (3,), priority=priority, max_tokens=1))
    said = kit.run(loop)
    assert list(said.finished) == ["urgent", "a", "b", "late"]


def test_tokens_of_earlier_attempts_count_and_are_not_repeated(kit: Any) -> None:
    loop = kit.loop()
    whole = kit.request("a", kit.prompt_of(20), max_tokens=10, temperature=0.7)
    expected = kit.FakeModel().expected(whole)
    loop.submit(
        kit.request("a", kit.prompt_of(20), max_tokens=10, temperature=0.7, output=expected[:6], attempt=3)
    )
    events = [event for _ in range(20) for event in loop.step()]
    sampled = [event for event in events if isinstance(event, TokensSampled)]
    assert sampled[0].position == 6
    assert [t for event in sampled for t in event.token_ids] == expected[6:]


def test_stop_token_is_the_last_token_said(kit: Any) -> None:
    free = kit.request("x", kit.prompt_of(20), max_tokens=10)
    expected = kit.FakeModel().expected(free)
    stop = expected[3]
    loop = kit.loop()
    loop.submit(kit.request("x", kit.prompt_of(20), max_tokens=10, stop_token_ids=(stop,)))
    said = kit.run(loop)
    assert said.tokens["x"] == expected[: expected.index(stop) + 1]
    assert (said.finished["x"].reason, said.finished["x"].stop_token_id) == (FinishReason.STOP, stop)
    loop.submit(kit.request("y", kit.prompt_of(20), max_tokens=10, stop_token_ids=(stop,), ignore_eos=True))
    assert kit.run(loop).tokens["y"] == expected


def test_an_admission_leaves_a_page_to_each_running_sequence(kit: Any) -> None:
    loop = kit.loop(full_pages=6, prefix_cache=False)
    loop.submit(kit.request("a", kit.prompt_of(30), max_tokens=60))  # 2 pages, later up to 6
    loop.submit(kit.request("b", kit.prompt_of(50, 1), max_tokens=4))  # 4 pages
    said = kit.run(loop)
    assert said.finished["b"].reason is FinishReason.LENGTH
    assert loop.snapshot().preemptions == 0


def test_a_full_queue_refuses_only_what_is_new(kit: Any) -> None:
    loop = kit.loop(max_queued_requests=1)
    loop.submit(kit.request("a", (1, 2)))
    moved = kit.request("moved", kit.prompt_of(20), attempt=2)
    with pytest.raises(RequestRejected, match="full"):
        loop.submit(moved)
    loop.submit(replace(moved, accepted=True))
    with pytest.raises(RequestRejected, match="full"):
        loop.submit(kit.request("b", (1, 2)))
    said = kit.run(loop)
    assert said.tokens["moved"] == kit.FakeModel().expected(moved)
    assert said.finished.keys() == {"a", "moved"}
