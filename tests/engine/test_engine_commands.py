"""What commands do in every state a sequence can be in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from antiphon.engine.events import PagesReserved, PrefillComputed, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.pages import AccountingError, Hold
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import RequestKind
from antiphon.engine.sequence import SequenceStatus
from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.messages import FinishReason

REMOTE, PREFILL = RequestKind.REMOTE_KV, RequestKind.PREFILL_ONLY


def _queued(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("x", kit.prompt_of(40)))


def _reserved(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("x", kit.prompt_of(40), kind=REMOTE))
    loop.step()


def _prefilling(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("x", kit.prompt_of(90), kind=PREFILL))
    loop.step()


def _pinned(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("x", kit.prompt_of(20), kind=PREFILL))
    loop.step()


def _running(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("x", kit.prompt_of(20), max_tokens=50))
    loop.step()
    loop.step()


def _preempted(kit: Any, loop: EngineLoop) -> None:
    loop.submit(kit.request("first", kit.prompt_of(30), max_tokens=90))
    loop.submit(kit.request("x", kit.prompt_of(30, 1), max_tokens=90))
    for _ in range(100):
        loop.step()
        if loop.snapshot().preemptions:
            return
    raise AssertionError("nothing was preempted")


STATES: dict[SequenceStatus, Callable[[Any, EngineLoop], None]] = {
    SequenceStatus.QUEUED: _queued,
    SequenceStatus.RESERVED: _reserved,
    SequenceStatus.PREFILLING: _prefilling,
    SequenceStatus.PINNED: _pinned,
    SequenceStatus.RUNNING: _running,
    SequenceStatus.PREEMPTED: _preempted,
}


def _loop_in(kit: Any, status: SequenceStatus) -> EngineLoop:
    loop: EngineLoop = kit.loop(full_pages=8)
    STATES[status](kit, loop)
    if status is not SequenceStatus.QUEUED:
        sequence = loop._ledger._sequences["x"]
        assert sequence.status is status
    return loop


@pytest.mark.parametrize("status", STATES)
def test_abort_frees_everything_in_every_state(kit: Any, status: SequenceStatus) -> None:
    loop = _loop_in(kit, status)
    loop.abort("x", 1)
    said = kit.run(loop)
    assert said.finished["x"].reason is FinishReason.ABORT
    assert not said.finished["x"].quarantined
    assert not kit.held_pages(loop)
    assert loop.snapshot().finished["abort"] == 1


@pytest.mark.parametrize("status", STATES)
def test_an_overdue_request_ends_in_every_state(kit: Any, status: SequenceStatus) -> None:
    now = [0.0]
    loop = EngineLoop(kit.FakeModel(), kit.settings(full_pages=8), clock=lambda: now[0])
    request = kit.request

    def with_deadline(name: str, *arguments: Any, **more: Any) -> Any:
        return request(name, *arguments, deadline_s=9.0 if name == "x" else None, **more)

    class Timed:
        request = staticmethod(with_deadline)
        prompt_of = staticmethod(kit.prompt_of)

    STATES[status](Timed, loop)
    now[0] = 9.0
    assert loop.has_work()
    said = kit.run(loop)
    end = said.finished["x"]
    assert end.reason is FinishReason.DEADLINE
    # Only where a transport may have been let at the pages.
    assert end.quarantined == (
        status in (SequenceStatus.RESERVED, SequenceStatus.PREFILLING, SequenceStatus.PINNED)
    )
    loop.release_quarantined("x", end.attempt)
    kit.run(loop)
    assert not kit.held_pages(loop)


def test_an_abort_that_arrives_during_a_step_wins_over_its_output(kit: Any) -> None:
    model = kit.FakeModel()
    loop = EngineLoop(model, kit.settings())
    loop.submit(kit.request("x", kit.prompt_of(20), max_tokens=50))
    loop.step()
    model.interrupt = lambda: loop.abort("x", 1)
    said = kit.Transcript()
    said.take(loop.step())
    assert not said.of_type(TokensSampled)
    assert said.finished["x"].reason is FinishReason.ABORT
    kit.run(loop)
    assert not kit.held_pages(loop)


def test_an_abort_during_the_last_chunk_leaves_nothing_pinned(kit: Any) -> None:
    model = kit.FakeModel()
    loop = EngineLoop(model, kit.settings())
    loop.submit(kit.request("x", kit.prompt_of(20), kind=PREFILL))
    model.interrupt = lambda: loop.abort("x", 1)
    said = kit.run(loop)
    assert not said.of_type(PrefillComputed)
    assert said.finished["x"].reason is FinishReason.ABORT
    assert not kit.held_pages(loop)


def test_pages_do_not_change_hands_before_the_step_that_uses_them_is_over(kit: Any) -> None:
    model = kit.FakeModel()
    loop = EngineLoop(model, kit.settings())
    loop.submit(kit.request("x", kit.prompt_of(20), max_tokens=50))
    loop.step()
    seen: list[Any] = []

    def abort_and_look() -> None:
        loop.abort("x", 1)
        seen.append(loop._ledger.pages.full.counts())

    model.interrupt = abort_and_look
    loop.step()
    assert seen[0]["used"] == 2


def test_quarantined_pages_wait_for_their_writer(kit: Any) -> None:
    """A late write after an abort must land in pages that nobody else was given."""
    loop = kit.loop(full_pages=8, prefix_cache=False)
    loop.submit(kit.request("x", kit.prompt_of(65), kind=REMOTE))
    reserved = loop.step()[0]
    assert isinstance(reserved, PagesReserved)
    loop.abort("x", 1, writer_granted=True)
    said = kit.run(loop)
    assert said.finished["x"].quarantined
    # The headroom page was nobody's to write and is free at once.
    assert kit.held_pages(loop) == {"full/quarantined": 4, "sliding/quarantined": 2}
    request = kit.request("y", kit.prompt_of(40, 1), max_tokens=20)
    loop.submit(request)
    for _ in range(200):
        if not loop.has_work():
            break
        for group, pages in (("full", reserved.full_pages), ("sliding", reserved.sliding_pages)):
            loop.kv_cache.memory(group)[list(pages)] = -1.0
        said.take(loop.step())
    assert said.tokens["y"] == kit.FakeModel().expected(request)
    # What does not fit beside the quarantine waits for its end.
    loop.submit(kit.request("z", kit.prompt_of(100, 2)))
    kit.run(loop, said)
    assert "z" not in said.finished
    assert loop.snapshot().waiting == 1
    loop.release_quarantined("x", 1)
    kit.run(loop, said)
    assert said.finished["z"].reason is FinishReason.LENGTH
    assert not kit.held_pages(loop)


def test_only_a_newer_attempt_may_follow_a_quarantined_one(kit: Any) -> None:
    loop = _loop_in(kit, SequenceStatus.RESERVED)
    loop.abort("x", 1, writer_granted=True)
    kit.run(loop)
    with pytest.raises(RequestRejected, match="quarantined"):
        loop.submit(kit.request("x", kit.prompt_of(40), kind=REMOTE))
    loop.submit(kit.request("x", kit.prompt_of(40), kind=REMOTE, attempt=2))
    said = kit.run(loop)
    assert said.of_type(PagesReserved)
    loop.release_quarantined("x", 1)
    loop.abort("x", 2)
    kit.run(loop)
    assert not kit.held_pages(loop)


def test_lost_kv_is_reserved_again_one_attempt_later(kit: Any) -> None:
    loop = _loop_in(kit, SequenceStatus.RESERVED)
    loop.kv_lost("x", 1)
    said = kit.run(loop)
    reserved = said.of_type(PagesReserved)[0]
    assert (reserved.attempt, reserved.kv_tokens) == (2, 39)  # type: ignore[attr-defined]
    loop.kv_ready("x", 1)
    kit.run(loop, said)
    assert loop.snapshot().awaiting_kv == 1, "a notification of the lost attempt is not believed"
    assert loop.snapshot().stale_commands == 1
    assert loop.snapshot().preemptions == 0
    loop.abort("x", 1)  # the router may not know of attempt 2 yet
    said = kit.run(loop)
    assert said.finished["x"].attempt == 2
    assert not kit.held_pages(loop)


def test_a_late_abort_does_not_touch_a_newer_submission(kit: Any) -> None:
    loop = kit.loop()
    loop.submit(kit.request("x", kit.prompt_of(20), attempt=2))
    loop.abort("x", 1)
    assert kit.run(loop).finished["x"].reason is FinishReason.LENGTH


def test_abort_then_submit_needs_no_step_between(kit: Any) -> None:
    loop = _loop_in(kit, SequenceStatus.RUNNING)
    loop.abort("x", 1)
    request = kit.request("x", kit.prompt_of(20), attempt=2)
    loop.submit(request)
    events = [event for _ in range(20) for event in loop.step()]
    tokens = [t for e in events if isinstance(e, TokensSampled) and e.attempt == 2 for t in e.token_ids]
    assert tokens == kit.FakeModel().expected(request)


def test_releasing_what_was_not_computed_is_a_defect(kit: Any) -> None:
    loop = _loop_in(kit, SequenceStatus.PREFILLING)
    loop.release("x", 1)
    with pytest.raises(IllegalTransition, match="prefilling"):
        loop.step()


def test_a_leak_is_found_when_the_engine_comes_to_rest(kit: Any) -> None:
    loop = kit.loop()
    loop.submit(kit.request("x", kit.prompt_of(20)))
    loop._ledger.pages.full.allocate(1, Hold.USED)
    with pytest.raises(AccountingError, match="1 holds of USED, 0 accounted for"):
        kit.run(loop)


def test_logits_that_are_not_finite_end_the_request_with_an_error(kit: Any) -> None:
    model = kit.FakeModel()
    model.logits = lambda hidden: torch.full((len(hidden), kit.VOCABULARY), float("nan"))
    loop = EngineLoop(model, kit.settings())
    loop.submit(kit.request("x", kit.prompt_of(20)))
    said = kit.run(loop)
    assert said.finished["x"].reason is FinishReason.ERROR
    assert "not finite" in str(said.finished["x"].error)
    assert not kit.held_pages(loop)
    loop.submit(kit.request("y", kit.prompt_of(20)))
    kit.run(loop)
    assert loop.snapshot().prefix_hit_tokens == 0, "nobody starts from a broken prefix"


def test_a_waiting_thread_is_woken_by_a_command(kit: Any) -> None:
    loop = kit.loop()
    assert not loop.wait_for_work(0.01)
    timer = threading.Timer(0.05, lambda: loop.submit(kit.request("x", (1,))))
    begin = time.monotonic()
    timer.start()
    assert loop.wait_for_work(120.0)
    assert time.monotonic() - begin < 60.0
    timer.join()


def test_waiting_ends_at_a_deadline(kit: Any) -> None:
    stands_at: float | None = time.monotonic()
    loop = kit.engine(
        *("plain", kit.FakeModel(), kit.settings()),
        clock=lambda: time.monotonic() if stands_at is None else stands_at,
    )
    loop.submit(kit.request("x", kit.prompt_of(20), kind=REMOTE, deadline_s=0.2))
    while loop.has_work():
        loop.step()
    assert loop.snapshot().awaiting_kv == 1
    stands_at = None
    begin = time.monotonic()
    assert loop.wait_for_work(120.0)
    assert time.monotonic() - begin < 60.0
    assert kit.run(loop).finished["x"].reason is FinishReason.DEADLINE


def test_snapshot_counts(kit: Any) -> None:
    loop = kit.loop()
    loop.submit(kit.request("x", kit.prompt_of(100), kind=PREFILL))
    assert loop.snapshot().waiting == 1
    loop.step()
    snapshot = loop.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.queued_prefill_tokens) == (1, 0, 99 - 32)
    assert snapshot.total_pages == 64
    assert snapshot.free_pages == 64 - 7
    assert sum(snapshot.pages["sliding"].values()) == 32


def test_an_id_may_be_used_again_after_its_end(kit: Any) -> None:
    loop = kit.loop()
    for _ in range(2):
        loop.submit(kit.request("x", kit.prompt_of(20)))
        assert kit.run(loop).finished["x"].reason is FinishReason.LENGTH


def test_an_abort_of_an_older_attempt_does_not_free_the_id(kit: Any) -> None:
    loop = kit.loop()
    loop.submit(kit.request("x", kit.prompt_of(20), attempt=2))
    loop.abort("x", 1)
    with pytest.raises(RequestRejected, match="attempt 2 of it is still running"):
        loop.submit(kit.request("x", kit.prompt_of(20), attempt=3))
