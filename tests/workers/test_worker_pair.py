"""Both workers in one process: what works, and what happens when the transport does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from router_stand_in import wait_until
from staged_scenes import Gate, Slow, overdue

from antiphon.configs.schema import DeploymentConfig
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork

Start = Callable[..., tuple[Any, Any]]
MakeConfig = Callable[..., DeploymentConfig]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100, 200])
def test_tokens_equal_those_of_an_engine_without_transfer(started: Start, length: int) -> None:
    pair, router = started(InProcessNetwork().transport)
    name = router.generate(router.random_prompt(length))
    router.wait(name)
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.finish.reason == "length"
    pair.wait_idle()
    if length > 1:
        router.wait_prefilled(name)
    assert outcome.prefilled == (length > 1), "a one-token prompt has nothing to prefill"


def test_tokens_over_nixl(started: Start) -> None:
    pair, router = started(None)
    names = [router.generate(router.random_prompt(length)) for length in (20, 150, 64, 3)]
    router.wait(*names)
    for name in names:
        outcome = router.requests[name]
        assert outcome.tokens == outcome.expected()
        assert outcome.finish.transfer_s > 0
    pair.wait_idle()
    assert pair.prefill.status().counters["bytes_sent"] > 0


def test_a_cached_prompt_ships_nothing(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(65)  # 64 positions of KV: whole pages
    first = router.generate(prompt)
    router.wait(first)
    second = router.generate(prompt)
    router.wait(second)
    assert router.requests[second].tokens == router.requests[first].tokens
    assert router.requests[second].prefilled == 0
    pair.wait_idle()


def test_many_requests_with_preemption(started: Start) -> None:
    """Too few decode pages for all: sequences are preempted, prefilled again and go on without a gap."""
    pair, router = started(
        InProcessNetwork(seed=3, max_delay_polls=5).transport, decode_settings={"full_pages": 24}
    )
    router.hold_prefill = True
    names = [router.generate(router.random_prompt(20 + 13 * i), max_tokens=60) for i in range(8)]
    wait_until(lambda: set(names[:4]) <= router.tickets.keys(), what="four reservations")
    # No step ends before these four are there, who run out of pages together.
    gate = Gate(pair.models[1])
    router.begin_prefill()
    complete = "receives_complete"
    wait_until(lambda: pair.decode.status().counters.get(complete, 0) >= 4, what="the KV of four")
    gate.opened.set()
    router.wait(*names)
    for name in names:
        assert router.requests[name].tokens == router.requests[name].expected(), name
    assert sum(len(router.requests[name].attempts) for name in names) > len(names), "nothing was preempted"
    pair.wait_idle()


def test_a_lost_notification_is_asked_for_again(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.LOSE_NOTIFICATION, count=2)
    name = router.generate(router.random_prompt(100))
    router.wait_prefilled(name)

    def missing() -> int:
        return len(pair.decode._dispatch.receiver._receives[name, 1].writes.missing())

    wait_until(lambda: pair.decode._thread.call(missing) == 2, what="every other notification")
    overdue(pair.decode)
    router.wait(name)
    assert network.happened[Fault.LOSE_NOTIFICATION] == 2
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.attempts == [1], "nothing had to be computed again"
    assert pair.decode.status().counters["missing_writes_asked"] == 2
    assert pair.prefill.status().counters["notifications_repeated"] == 2
    pair.wait_idle()


def test_a_repeated_notification_is_harmless(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.REPEAT_NOTIFICATION, count=100)
    name = router.generate(router.random_prompt(100))
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()
    counters = pair.decode.status().counters
    assert counters.get("notifications_repeated", 0) + counters.get("notifications_late", 0) > 0


def test_a_post_that_fails_once_is_retried(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.FAIL_POST)
    name = router.generate(router.random_prompt(50))
    router.wait(name)
    assert router.requests[name].attempts == [1]
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


@pytest.mark.parametrize(
    ("fault", "count", "stage"), [(Fault.FAIL_POST, 2, "post"), (Fault.FAIL_WRITE, 1, "connection")]
)
def test_a_failed_write_is_said_and_recomputed(started: Start, fault: Fault, count: int, stage: str) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(fault, count=count)
    name = router.generate(router.random_prompt(100))
    router.wait(name)
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.attempts[:2] == [1, 2]
    router.wait_prefill_failed(name)
    stages = [failure.stage for failure in outcome.prefill_failures]
    assert stages[0] == stage
    # A connection that broke is made anew, and until then the worker says that it has none.
    assert set(stages[1:]) <= ({"handshake"} if stage == "connection" else set())
    assert pair.decode.status().counters["receives_lost"] >= 1
    pair.wait_idle()
    assert pair.prefill.status().ready


def test_a_corrupt_write_is_noticed_and_recomputed(started: Start, make_config: MakeConfig) -> None:
    network = InProcessNetwork(seed=5)
    pair, router = started(network.transport, deployment=make_config(verify_checksums=True))
    intact = router.generate(router.random_prompt(100))
    router.wait(intact)
    network.inject(Fault.CORRUPT)
    name = router.generate(router.random_prompt(100))
    router.wait(name)
    assert network.happened[Fault.CORRUPT] == 1
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.attempts == [1, 2]
    assert pair.decode.status().counters["checksum_mismatches"] == 1
    pair.wait_idle()


def test_a_late_write_after_an_abort_never_touches_pages_in_use(started: Start) -> None:
    """The pages of an aborted request stay set aside until its writer is done; others get other pages."""
    network = InProcessNetwork()
    pair, router = started(network.transport, decode_settings={"full_pages": 24, "prefix_cache": False})
    network.inject(Fault.HOLD, count=100)
    aborted = router.generate(router.random_prompt(150))
    wait_until(lambda: network.held > 0, what="a write")
    router.abort(aborted)
    router.wait(aborted)
    assert router.requests[aborted].finish.reason == "abort"
    assert pair.decode.status().pages_quarantined > 0
    wait_until(lambda: pair.prefill.status().pages_quarantined > 0, what="the abort at prefill")
    network._injections.clear()
    # Fill all other pages with sequences that are still decoding when the late write lands.
    gate = Gate(pair.models[1])
    names = [router.generate(router.random_prompt(60), max_tokens=40) for _ in range(3)]
    complete = "receives_complete"
    wait_until(lambda: pair.decode.status().counters.get(complete, 0) >= 2, what="the KV of two")
    assert gate.reached.wait(60)
    for side, status in zip(("its source", "its target"), pair.statuses(), strict=True):
        assert status.pages_quarantined > 0, f"{side} must stay as it is while the write is under way"
    network.release_held()
    wait_until(lambda: pair.prefill.status().pages_quarantined == 0, what="the end of the write")
    gate.opened.set()
    router.wait(*names)
    for name in names:
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_write_that_hangs_is_given_up_and_its_pages_wait_for_it(
    started: Start, make_config: MakeConfig
) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport, deployment=make_config(completion_timeout_s=0.2))
    network.inject(Fault.HOLD)
    name = router.generate(router.random_prompt(40))
    router.wait(name)
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.attempts[-1] >= 2
    wait_until(lambda: pair.decode.status().pages_quarantined > 0, what="pages set aside at decode")
    wait_until(lambda: pair.prefill.status().pages_quarantined > 0, what="pages set aside at prefill")
    assert all(status.pages_quarantined > 0 for status in pair.statuses()), "the write may still land"
    network.release_held()
    pair.wait_idle()


@pytest.mark.parametrize("hold_prefill", [True, False])
def test_abort_in_any_state_frees_everything(started: Start, hold_prefill: bool) -> None:
    pair, router = started(InProcessNetwork(max_delay_polls=50).transport)
    router.hold_prefill = hold_prefill
    Slow(pair.models[1], lambda: False, layer_s=0.005)  # none ends by itself
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        name = router.generate(router.random_prompt(120), max_tokens=3000)
        time.sleep(delay)
        router.abort(name)
        router.wait(name)
        assert router.requests[name].finish.reason == "abort"
    pair.wait_idle()


def test_an_abort_at_prefill_alone_makes_decode_reserve_again(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.HOLD)
    # Nothing is computed behind the first layer group: had every write been posted before the abort, the set
    # would be complete once they are let go, and the first attempt would go on, rightly.
    gate = Gate(pair.models[0], layers=2)
    name = router.generate(router.random_prompt(40))
    assert gate.reached.wait(60)
    wait_until(lambda: network.held > 0, what="a write")
    router.abort_at("prefill-0", name, attempt=1)
    wait_until(lambda: pair.prefill.status().counters.get("jobs_cancelled"), what="the abort")
    gate.opened.set()
    network.release_held()
    router.wait(name)  # long before any timeout
    assert router.requests[name].attempts == [1, 2]
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_cancelled_write_that_lost_its_connection_is_not_said_to_have_drained(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.HOLD)
    network.inject(Fault.FAIL_WRITE)
    gate = Gate(pair.models[0], layers=2)
    name = router.generate(router.random_prompt(40))
    assert gate.reached.wait(60)
    wait_until(lambda: network.held > 0, what="a write")
    router.abort_at("prefill-0", name, attempt=1)
    wait_until(lambda: pair.prefill.status().counters.get("jobs_cancelled"), what="the abort")
    network.release_held()
    gate.opened.set()
    router.wait(name)
    assert pair.decode.status().counters["failures_connection"] == 1, "its pages wait for the network"
    assert router.requests[name].attempts[:2] == [1, 2]
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_ticket_of_something_else_is_refused(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    router.hold_prefill = True
    name = router.generate(router.random_prompt(40))
    wait_until(lambda: name in router.tickets, what="the reservation")
    router.prefill_with_wrong_attempt(name)
    router.wait_prefill_failed(name)
    assert router.requests[name].prefill_failures[0].stage == "reserve"
    router.abort(name)
    router.wait(name)
    pair.wait_idle()


def test_an_abort_stops_prefill_within_one_chunk(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    gate = Gate(pair.models[0], layers=1)
    name = router.generate(router.random_prompt(900))
    assert gate.reached.wait(60)
    router.abort(name)
    wait_until(lambda: pair.prefill.status().counters.get("jobs_cancelled"), what="the abort")
    gate.opened.set()
    router.wait(name)
    pair.wait_idle()
    assert pair.models[0].tokens_computed == 32, "one chunk was under way, and no other began"


def test_layers_are_shipped_while_later_ones_compute(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    gate = Gate(pair.models[0], layers=2)  # the first of two layer groups is complete
    name = router.generate(router.random_prompt(30))
    assert gate.reached.wait(60)
    wait_until(lambda: pair.prefill.status().counters.get("writes_done"), what="a write")
    counters = pair.prefill.status().counters
    assert (counters["writes_done"], counters["bytes_sent"] > 0) == (1, True)
    assert not router.requests[name].tokens
    gate.opened.set()
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_deadline_while_waiting_for_kv(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.HOLD, count=100)
    name = router.generate(router.random_prompt(60), deadline_s=0.15)
    router.wait(name)
    assert router.requests[name].finish.reason == "deadline"
    network._injections.clear()  # a write may still be posted, before prefill hears of the end
    network.release_held()
    pair.wait_idle()


def test_a_lost_router_takes_its_requests_with_it(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    Slow(pair.models[1], lambda: False, layer_s=0.002)  # it does not end by itself
    router.wait_tokens(router.generate(router.random_prompt(60), max_tokens=3000))
    router.thread.call(router.node.close)
    pair.wait_idle()
    assert pair.decode.status().counters["requests_of_lost_routers"] == 1


def test_a_router_that_does_not_acknowledge_is_cut_off(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.decode_worker.outbox.MAX_UNACKNOWLEDGED_BATCHES", 20)
    pair, router = started(InProcessNetwork().transport)
    router.acknowledge = False
    name = router.generate(router.random_prompt(10), max_tokens=500)
    wait_until(lambda: router.lost, what="the end of its link")
    assert 0 < len(router.requests[name].tokens) <= 20
    pair.wait_idle()
    assert pair.decode.status().counters["outboxes_full"] == 1


def test_draining_workers_finish_and_refuse(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    running = router.generate(router.random_prompt(40), max_tokens=30)
    router.wait_tokens(running)
    assert pair.prefill.drain(60)
    assert pair.decode.drain(60)
    assert router.requests[running].finish is not None or router.requests[running].tokens
    router.wait(running)
    refused = router.generate(router.random_prompt(40))
    router.wait(refused)
    assert router.requests[refused].refused.retryable
    wait_until(lambda: all(load.draining for load in router.loads.values()), what="word of the draining")
    pair.wait_idle()


def test_a_prompt_that_cannot_fit_is_refused_for_good(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    name = router.generate(router.random_prompt(5000))
    router.wait(name)
    assert not router.requests[name].refused.retryable
    assert "5000 tokens" in router.requests[name].refused.reason
    pair.wait_idle()
