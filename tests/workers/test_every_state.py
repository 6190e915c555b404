"""Every fault in every state of a request, on either side: it ends once and rightly, and nothing stays held.

A scene brings one request to a state and keeps it there until ``let_go``. The fault strikes in between. What
must follow does not depend on the state: the text of an undisturbed run or one honest reason, and both
workers free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from staged_scenes import PROMPT_TOKENS, Scene, Staging, Start, overdue, put_forward, until

from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import EngineRequest
from antiphon.prefill_worker.jobs import JobState
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    CancelWrites,
    GrantWrites,
    MissingWrites,
    RefuseWrites,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.messages import GenerateRequest, PrefillRequest

ANNOUNCED = JobState.ANNOUNCED
DEADLINE_S = 1000.0
"""Longer than it takes to come to any of the states."""

REPEATABLE = (
    AnnounceWrites,
    CancelWrites,
    GrantWrites,
    MissingWrites,
    RefuseWrites,
    WritesDrained,
    WritesFailed,
)


class Recorded:
    """Every message that was sent over any link, except numbered batches and handshakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send = LinkNode.send
        self._said: list[tuple[LinkNode, Peer, Any]] = []
        recorded = self

        def send(node: LinkNode, peer: Peer, message: Any) -> bool:
            if isinstance(message, REPEATABLE):
                recorded._said.append((node, peer, message))
            return recorded._send(node, peer, message)

        monkeypatch.setattr(LinkNode, "send", send)

    def repeat(self) -> int:
        """Say everything again; how much there was."""
        said = list(self._said)
        for node, peer, message in said:
            self._send(node, peer, message)
        return len(said)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


STATES = [
    "decode_queued",
    "decode_reserved",
    "prefill_queued",
    "prefill_announced",
    "decode_receiving",
    "decode_stopping",
    "decode_abandoned",
    "prefill_ending",
    "decode_running",
    "decode_preempted",
]


@pytest.fixture
def scene_of(started: Start) -> Callable[..., Scene]:
    def build(state: str, deadline_s: float | None = None) -> Scene:
        scene: Scene = getattr(Staging(started, deadline_s), state)()
        return scene

    return build


@pytest.mark.parametrize("state", STATES)
def test_an_abort_ends_it_and_frees_both_sides(state: str, scene_of: Any) -> None:
    scene = scene_of(state)
    scene.router.abort(scene.name)
    if state != "decode_running":  # there a step is under way, which nothing interrupts
        scene.router.wait(scene.name)
    scene.let_go()
    scene.router.wait(scene.name)
    assert scene.outcome.finish.reason == "abort"
    scene.pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_a_deadline_ends_it_and_frees_both_sides(state: str, scene_of: Any) -> None:
    scene = scene_of(state, deadline_s=DEADLINE_S)
    put_forward(scene.pair.decode._engine, 2 * DEADLINE_S)
    if state != "decode_running":
        scene.router.wait(scene.name)
    scene.let_go()
    scene.router.wait(scene.name)
    assert scene.outcome.finish.reason == "deadline"
    scene.pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_a_router_that_dies_leaves_nothing_held(state: str, scene_of: Any) -> None:
    scene = scene_of(state)
    scene.router.thread.call(scene.router.node.close)
    until(lambda: not scene.router.node.peers(), "the end of its links")
    lost = scene.pair.decode._dispatch._counters
    until(lambda: lost["requests_of_lost_routers"] > 0, "the decode worker's notice")
    scene.let_go()
    scene.pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_a_prefill_worker_that_dies_changes_no_token(state: str, scene_of: Any) -> None:
    scene = scene_of(state)
    pair, router = scene.pair, scene.router
    old = pair.prefill
    old._thread.call(old._node.close)
    scene.network.kill(f"prefill-0/{pair.prefill_address.epoch:x}/0")
    scene.let_go()  # what was on its way, or was being computed, ends with it
    old.stop()
    pair.replace_prefill()
    router.connect(pair.prefill_address)
    scene.drive()
    assert scene.outcome.tokens == scene.outcome.expected()
    router.abort_rest(scene.name)
    pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_a_decode_worker_that_dies_leaves_the_prefill_worker_free_for_its_next_life(
    state: str, scene_of: Any
) -> None:
    """The next life has the same name: what the prefill worker knew of the old one must not be used."""
    scene = scene_of(state)
    pair, router = scene.pair, scene.router
    old, old_peer = pair.decode, pair.decode._node.me
    old._thread.call(old._node.close)
    scene.network.kill(f"decode-0/{pair.decode_address.epoch:x}/0")
    scene.let_go()
    old.stop()
    pair.replace_decode()
    until(lambda: not router.node.is_up(old_peer), "the router's notice")
    router.hold_prefill = False
    router.connect(pair.decode_address)
    again = router.generate(router.random_prompt(PROMPT_TOKENS))
    router.wait(again)
    assert router.requests[again].tokens == router.requests[again].expected()
    pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_a_link_between_workers_that_ends_changes_no_token(state: str, scene_of: Any) -> None:
    scene = scene_of(state)
    pair = scene.pair
    noticed = threading.Event()
    lost = pair.prefill._dispatch.on_lost
    pair.prefill._dispatch.on_lost = lambda *arguments: (lost(*arguments), noticed.set())
    pair.decode._thread.call(pair.decode._node.disconnect, pair.prefill._node.me, "test")
    assert noticed.wait(60)
    scene.let_go()
    pair.wait_ready()
    scene.drive()
    assert scene.outcome.tokens == scene.outcome.expected()
    scene.router.abort_rest(scene.name)
    pair.wait_idle()


@pytest.mark.parametrize("state", STATES)
def test_repeated_messages_change_no_token(state: str, scene_of: Any, recorded: Recorded) -> None:
    """Whatever the workers have told each other is said again, in the same order: twice while it matters."""
    scene = scene_of(state)
    recorded.repeat()
    scene.let_go()
    scene.drive()
    assert recorded.repeat() >= 1
    assert scene.outcome.tokens == scene.outcome.expected()
    scene.router.abort_rest(scene.name)
    scene.pair.wait_idle()


def test_a_full_queue_lets_a_request_on_its_way_to_other_pages_pass(scene_of: Any) -> None:
    """It was taken before those that fill the queue."""
    scene = scene_of("decode_receiving")
    scene.router.hold_prefill = True
    scene.pair.decode._engine._inbox._max_queued = 0
    overdue(scene.pair.decode, 4)
    until(lambda: scene.outcome.attempts == [1, 2] or scene.outcome.refused, "other pages")
    scene.let_go()
    scene.drive()
    assert scene.outcome.refused is None
    assert scene.outcome.tokens == scene.outcome.expected()
    scene.pair.wait_idle()


@pytest.mark.parametrize("state", ["decode_queued", "decode_receiving", "decode_running"])
def test_a_full_queue_lets_a_later_attempt_of_what_it_holds_pass(state: str, scene_of: Any) -> None:
    scene = scene_of(state)
    decode, router, outcome = scene.pair.decode, scene.router, scene.outcome
    first = decode._dispatch._requests[scene.name].message
    decode._engine._inbox._max_queued = 0
    again = GenerateRequest(scene.name, 9, outcome.prompt, list(outcome.tokens), outcome.sampling)
    router.node.send(decode._node.me, again)

    def heard() -> bool:
        held = decode._dispatch._requests.get(scene.name)
        return bool(held and (held.message is not first or held.successor)) or outcome.refused is not None

    until(heard, "the later attempt")
    scene.let_go()
    scene.drive()
    assert outcome.refused is None
    assert outcome.attempts[-1] == 9
    assert outcome.tokens == outcome.expected()
    router.abort_rest(scene.name)
    scene.pair.wait_idle()


def test_a_full_queue_lets_what_another_worker_began_pass(scene_of: Any) -> None:
    """Its client has read tokens; one that nobody has begun is refused."""
    scene = scene_of("decode_running")
    decode, router = scene.pair.decode, scene.router
    decode._engine._inbox._max_queued = 0
    prompt = router.random_prompt(50)
    new = router.generate(prompt)
    router.wait(new)
    assert router.requests[new].refused.retryable
    begun = router.requests["begun"] = type(scene.outcome)(prompt, router.requests[new].sampling)
    begun.tokens = begun.expected()[:2]
    router.node.send(decode._node.me, GenerateRequest("begun", 9, prompt, begun.tokens[:], begun.sampling))
    scene.let_go()
    router.wait("begun")
    assert begun.refused is None
    assert begun.tokens == begun.expected()
    scene.pair.wait_idle()


def test_a_refusal_on_the_way_to_other_pages_is_told(scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the attempt that the router knows: it takes no notice of any other, and would wait for ever."""
    scene = scene_of("decode_receiving")
    scene.router.hold_prefill = True

    def refuse(request: EngineRequest) -> None:
        raise RequestRejected(request.request_id, "for a reason of its own", retryable=True)

    monkeypatch.setattr(scene.pair.decode._engine, "submit", refuse)
    overdue(scene.pair.decode, 4)
    scene.router.wait(scene.name)
    assert scene.outcome.refused.attempt == scene.outcome.attempts[-1] == 1
    assert scene.outcome.refused.retryable
    scene.let_go()
    scene.pair.wait_idle()


def test_an_attempt_that_is_asked_for_again_is_no_matter_of_the_pages_of_the_work_before(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the engine may still hold: by that the request would be refused, and for good."""
    scene = scene_of("prefill_ending")
    router, engine, jobs = scene.router, scene.pair.prefill._engine, scene.pair.prefill._dispatch._jobs
    ticket, kept = router.tickets[scene.name], []
    monkeypatch.setattr(engine, "release_quarantined", lambda *name: kept.append(name))
    scene.let_go()
    until(lambda: kept and not jobs, "the end of the work")
    again = PrefillRequest(scene.name, 1, scene.outcome.prompt, ticket)
    router.node.send(scene.pair.prefill._node.me, again)
    until(lambda: scene.outcome.prefill_failures or scene.outcome.refused, "its end")
    assert scene.outcome.refused is None
    assert scene.outcome.prefill_failures[0].reason == "the reservation is gone"
    monkeypatch.undo()
    for name in kept:
        engine.release_quarantined(*name)
    scene.drive()
    assert scene.outcome.tokens == scene.outcome.expected()
    scene.pair.wait_idle()


@pytest.mark.parametrize("answer", [GrantWrites, RefuseWrites])
def test_an_answer_to_another_announcement_is_not_for_this_one(answer: type, scene_of: Any) -> None:
    """Of an earlier work on the same attempt, for pages in which a sequence may run by now."""
    scene = scene_of("prefill_announced")
    pair, key = scene.pair, (scene.name, 1)
    job = pair.prefill._dispatch._jobs[key]
    reason = () if answer is GrantWrites else ("the reservation is gone",)
    late = answer(*key, pair.decode_address.epoch, job.announcement + 1, *reason)
    before = pair.prefill.status().counters.get("stale_messages", 0)
    pair.decode._thread.call(pair.decode._node.send, pair.prefill._node.me, late)
    until(
        lambda: (
            pair.prefill.status().counters.get("stale_messages", 0) > before or job.state is not ANNOUNCED
        ),
        "the answer",
    )
    assert job.state is ANNOUNCED
    scene.let_go()
    scene.drive()
    assert scene.outcome.tokens == scene.outcome.expected()
    scene.router.abort_rest(scene.name)
    pair.wait_idle()
