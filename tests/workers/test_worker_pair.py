"""Both workers in one process: what works, and what happens when the transport does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from staged_scenes import Slow

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
    assert outcome.prefilled == (length > 1), "a one-token prompt has nothing to prefill"
    pair.wait_idle()


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
    # The first ones must not have ended by the time that others are there with whom they run out of pages.
    Slow(pair.models[1], lambda: sum(each.prefilled > 0 for each in router.requests.values()) >= 4)
    names = [router.generate(router.random_prompt(20 + 13 * i), max_tokens=60) for i in range(8)]
    router.wait(*names)
    for name in names:
        assert router.requests[name].tokens == router.requests[name].expected(), name
    assert sum(len(router.requests[name].attempts) for name in names) > len(names), "nothing was preempted"
    pair.wait_idle()


def test_a_lost_notification_is_asked_for_again(started: Start, make_config: MakeConfig) -> None:
    network = InProcessNetwork()
    # Long enough for everything to be computed and written before anything is asked for.
    pair, router = started(network.transport, deployment=make_config(completion_timeout_s=3.0))
    network.inject(Fault.LOSE_NOTIFICATION, count=2)
    name = router.generate(router.random_prompt(100))
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
    while network.held == 0:
        time.sleep(0.001)
    router.abort(aborted)
    router.wait(aborted)
    assert router.requests[aborted].finish.reason == "abort"
    assert pair.decode.status().pages_quarantined > 0
    assert pair.prefill.status().pages_held > 0, "the source must stay as it is while it is read"
    network.inject(Fault.HOLD, count=0)
    network._injections.clear()
    # Fill all other pages with sequences that are still decoding when the late write lands.
    names = [router.generate(router.random_prompt(60), max_tokens=40) for _ in range(3)]
    time.sleep(0.2)
    network.release_held()
    router.wait(*names)
    for name in names:
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_write_that_hangs_is_given_up_and_its_pages_wait_for_it(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.HOLD)
    name = router.generate(router.random_prompt(40))
    router.wait(name)
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.attempts[-1] >= 2
    assert pair.decode.status().pages_quarantined > 0, "the hanging write may still land"
    assert pair.prefill.status().pages_quarantined > 0
    network.release_held()
    pair.wait_idle()


@pytest.mark.parametrize("hold_prefill", [True, False])
def test_abort_in_any_state_frees_everything(started: Start, hold_prefill: bool) -> None:
    pair, router = started(InProcessNetwork(max_delay_polls=50).transport)
    router.hold_prefill = hold_prefill
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        name = router.generate(router.random_prompt(120), max_tokens=200)
        time.sleep(delay)
        router.abort(name)
        router.wait(name)
        assert router.requests[name].finish.reason == "abort"
    pair.wait_idle()


def test_an_abort_at_prefill_alone_makes_decode_reserve_again(
    started: Start, make_config: MakeConfig
) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport, deployment=make_config(completion_timeout_s=300.0))
    network.inject(Fault.HOLD)
    # Nothing is computed behind the first layer group: had every write been posted before the abort, the set
    # would be complete once they are let go, and the first attempt would go on, rightly.
    gate = Gate(pair.models[0], layers=2)
    name = router.generate(router.random_prompt(40))
    assert gate.reached.wait(60)
    while network.held == 0:
        time.sleep(0.001)
    router.abort_at("prefill-0", name, attempt=1)
    while not pair.prefill.status().counters.get("jobs_cancelled"):
        time.sleep(0.001)
    gate.opened.set()
    network.release_held()
    router.wait(name)  # long before any timeout
    assert router.requests[name].attempts == [1, 2]
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_cancelled_write_that_lost_its_connection_is_not_said_to_have_drained(
    started: Start, make_config: MakeConfig
) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport, deployment=make_config(completion_timeout_s=300.0))
    network.inject(Fault.HOLD)
    network.inject(Fault.FAIL_WRITE)
    gate = Gate(pair.models[0], layers=2)
    name = router.generate(router.random_prompt(40))
    assert gate.reached.wait(60)
    while network.held == 0:
        time.sleep(0.001)
    router.abort_at("prefill-0", name, attempt=1)
    while not pair.prefill.status().counters.get("jobs_cancelled"):
        time.sleep(0.001)
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
    while not router.requests[name].attempts:
        time.sleep(0.001)
    router.prefill_with_wrong_attempt(name)
    while not router.requests[name].prefill_failures:
        time.sleep(0.001)
    assert router.requests[name].prefill_failures[0].stage == "reserve"
    router.abort(name)
    router.wait(name)
    pair.wait_idle()


class Gate:
    """Stops a fake model in the middle of its next forward pass, after ``layers`` layers."""

    def __init__(self, model: Any, layers: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._model, self._layers = model, layers
        model.interrupt = self._after_layer

    def _after_layer(self) -> None:
        self._layers -= 1
        if self._layers > 0:
            self._model.interrupt = self._after_layer
            return
        self.reached.set()
        assert self.opened.wait(120)


def test_an_abort_stops_prefill_within_one_chunk(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    gate = Gate(pair.models[0], layers=1)
    name = router.generate(router.random_prompt(900))
    assert gate.reached.wait(60)
    router.abort(name)
    while not pair.prefill.status().counters.get("jobs_cancelled"):
        time.sleep(0.001)
    gate.opened.set()
    router.wait(name)
    pair.wait_idle()
    assert pair.models[0].tokens_computed == 32, "one chunk was under way, and no other began"


def test_layers_are_shipped_while_later_ones_compute(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    gate = Gate(pair.models[0], layers=2)  # the first of two layer groups is complete
    name = router.generate(router.random_prompt(30))
    assert gate.reached.wait(60)
    deadline = time.monotonic() + 60
    while not pair.prefill.status().counters.get("writes_done") and time.monotonic() < deadline:
        time.sleep(0.001)
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
    network.release_held()
    pair.wait_idle()


def test_a_lost_router_takes_its_requests_with_it(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    router.generate(router.random_prompt(60), max_tokens=2000)
    deadline = time.monotonic() + 60
    while not any(outcome.tokens for outcome in router.requests.values()) and time.monotonic() < deadline:
        time.sleep(0.005)
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
    deadline = time.monotonic() + 60
    while not router.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 0 < len(router.requests[name].tokens) <= 20
    pair.wait_idle()
    assert pair.decode.status().counters["outboxes_full"] == 1


def test_draining_workers_finish_and_refuse(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    running = router.generate(router.random_prompt(40), max_tokens=30)
    deadline = time.monotonic() + 60
    while not router.requests[running].tokens and time.monotonic() < deadline:
        time.sleep(0.002)
    assert pair.prefill.drain(60)
    assert pair.decode.drain(60)
    assert router.requests[running].finish is not None or router.requests[running].tokens
    router.wait(running)
    refused = router.generate(router.random_prompt(40))
    router.wait(refused)
    assert router.requests[refused].refused.retryable
    assert all(load.draining for load in router.loads.values())
    pair.wait_idle()


def test_a_prompt_that_cannot_fit_is_refused_for_good(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    name = router.generate(router.random_prompt(5000))
    router.wait(name)
    assert not router.requests[name].refused.retryable
    assert "5000 tokens" in router.requests[name].refused.reason
    pair.wait_idle()
