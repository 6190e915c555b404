"""Placement, prefix memory and circuits as functions of plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.messages import LoadReport
from antiphon.router.dispatch.circuit import Circuit, CircuitState
from antiphon.router.dispatch.fleet import Fleet
from antiphon.router.dispatch.placement import (
    DecodeCandidate,
    PlacementReason,
    PrefillCandidate,
    choose_decode,
    choose_prefill,
)
from antiphon.router.dispatch.prefix_index import PrefixIndex, page_keys
from antiphon.router.metrics import RouterMetrics


def decode(worker_id: str, free: int = 100, active: int = 0, cached: int = 0) -> DecodeCandidate:
    return DecodeCandidate(worker_id, free, active, cached)


def prefill(worker_id: str, queued: int = 0, cached: int = 0) -> PrefillCandidate:
    return PrefillCandidate(worker_id, queued, cached)


@pytest.mark.parametrize(
    ("candidates", "worker", "reason"),
    [
        ([decode("a", free=0, active=99)], "a", PlacementReason.ONLY),
        ([decode("a", active=5), decode("b", active=1)], "b", PlacementReason.LEAST_LOADED),
        ([decode("a", active=1, free=50), decode("b", active=1, free=60)], "b", PlacementReason.LEAST_LOADED),
        ([decode("a", free=9), decode("b", active=30)], "b", PlacementReason.LEAST_LOADED),
        ([decode("a", free=9, active=2), decode("b", free=3, active=1)], "b", PlacementReason.NO_ROOM),
        ([decode("a"), decode("b", active=2, cached=640)], "b", PlacementReason.PREFIX),
        ([decode("a"), decode("b", active=3, cached=640)], "a", PlacementReason.LEAST_LOADED),
        ([decode("b"), decode("a")], "a", PlacementReason.LEAST_LOADED),
    ],
)
def test_decode_choice(candidates, worker, reason):
    choice = choose_decode(candidates, pages_needed=10)
    assert (choice.worker_id, choice.reason) == (worker, reason)


@pytest.mark.parametrize(
    ("candidates", "worker", "reason"),
    [
        ([prefill("a", queued=99)], "a", PlacementReason.ONLY),
        ([prefill("a", queued=500), prefill("b", queued=100)], "b", PlacementReason.LEAST_LOADED),
        ([prefill("a"), prefill("b", cached=640)], "b", PlacementReason.PREFIX),
        ([prefill("a"), prefill("b", queued=600, cached=640)], "b", PlacementReason.PREFIX),
        ([prefill("a"), prefill("b", queued=700, cached=640)], "a", PlacementReason.LEAST_LOADED),
        # Fully cached still costs its place in the queue.
        ([prefill("a", cached=1000), prefill("b", queued=1, cached=1000)], "a", PlacementReason.LEAST_LOADED),
    ],
)
def test_prefill_choice(candidates, worker, reason):
    choice = choose_prefill(candidates, prompt_tokens=1000)
    assert (choice.worker_id, choice.reason) == (worker, reason)


def test_nobody_to_choose():
    assert choose_decode([], 1) is None
    assert choose_prefill([], 1) is None


@given(st.lists(st.integers(0, 200_000), max_size=200), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_page_keys_agree_exactly_on_the_common_pages(tokens, cut, page):
    other = tokens[:cut] + [t + 1 for t in tokens[cut:]]
    ours, theirs = page_keys(tokens, page), page_keys(other, page)
    common = min(cut, len(tokens)) // page
    whole = max(len(tokens) - 1, 0) // page
    assert len(ours) == whole
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [i < common for i in range(whole)]


def test_a_salt_separates_equal_prompts():
    tokens = list(range(64))
    assert not set(page_keys(tokens, 16, "a")) & set(page_keys(tokens, 16, "b"))


def test_prefix_index_counts_leading_pages_and_forgets_the_oldest():
    index = PrefixIndex(capacity_pages=4)
    first, second = page_keys(list(range(49)), 16), page_keys(list(range(100, 149)), 16)
    index.record("a", first)
    assert index.cached_pages("a", first) == 3
    assert index.cached_pages("a", second) == 0
    assert index.cached_pages("b", first) == 0
    index.record("a", second)
    # One page of the first prompt is left: its beginning, the part that other prompts can share.
    assert index.cached_pages("a", first) == 1
    assert index.cached_pages("a", second) == 3
    index.forget("a")
    assert index.cached_pages("a", second) == 0


def test_circuit_opens_after_failures_in_a_row_and_tries_once():
    circuit = Circuit(failures_to_open=2, pause_s=5)
    circuit.failed(0)
    circuit.succeeded()
    circuit.failed(1)
    assert circuit.allows(1)
    circuit.failed(2)
    assert circuit.state(2) is CircuitState.OPEN
    assert not circuit.allows(6.9)
    assert circuit.state(7) is CircuitState.HALF_OPEN
    assert circuit.allows(7)
    circuit.sent(7)
    assert not circuit.allows(8)
    circuit.failed(8)
    assert circuit.state(8) is CircuitState.OPEN
    circuit.sent(13)
    circuit.succeeded()
    assert circuit.state(13) is CircuitState.CLOSED
    assert circuit.allows(13)


def test_a_lost_trial_does_not_keep_a_worker_out_for_ever():
    circuit = Circuit(failures_to_open=1, pause_s=5)
    circuit.failed(0)
    circuit.sent(5)
    assert not circuit.allows(9)
    assert circuit.allows(10)


def report(epoch: int = 1, **peers: int) -> LoadReport:
    return LoadReport(epoch, 0, 0, 90, 100, 0, kv_peers=peers)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(RouterMetrics("tiny"), page_size_tokens=16)
    for worker_id, role in (
        ("p0", Role.PREFILL),
        ("p1", Role.PREFILL),
        ("d0", Role.DECODE),
        ("d1", Role.DECODE),
    ):
        fleet.add(WorkerAddress(worker_id, role, 1, "inproc://x"))
        fleet.take_report(worker_id, report())
    return fleet


def test_only_workers_that_moved_a_test_page_are_paired(fleet):
    assert fleet.pairs() == []
    fleet.take_report("p0", report(d0=1))
    fleet.take_report("p1", report(d1=1))
    assert fleet.pairs() == [("p0", "d0"), ("p1", "d1")]
    assert [c.worker_id for c in fleet.prefill_candidates("d1", [], (), 0)] == ["p1"]


def test_a_decode_worker_that_computes_prompts_is_a_pair_with_itself(fleet):
    fleet.take_report("d0", LoadReport(1, 0, 0, 90, 100, 0, computes_prompts=True))
    assert fleet.pairs() == [("d0", "d0")]
    assert [c.worker_id for c in fleet.decode_candidates([], (), 0)] == ["d0"]
    assert fleet.prefill_candidates("d0", [], (), 0) == []
    fleet.take_report("d0", LoadReport(1, 0, 0, 90, 100, 0, draining=True, computes_prompts=True))
    assert fleet.pairs() == []


def test_a_pairing_with_an_earlier_life_does_not_count(fleet):
    fleet.take_report("p0", report(d0=7))
    assert fleet.pairs() == []
    fleet.take_report("p0", report(epoch=9, d0=1))
    assert fleet.pairs() == []


def test_load_sent_since_the_last_report_counts(fleet):
    fleet.take_report("p0", report(d0=1, d1=1))
    fleet.assign("d0", "r", 0, pages=5)
    fleet.assign("p0", "r", 0, tokens=70)
    d0, d1 = fleet.decode_candidates([], (), 0)
    assert (d0.active, d0.free_pages) == (1, 85)
    assert (d1.active, d1.free_pages) == (0, 90)
    assert fleet.prefill_candidates("d0", [], (), 0)[0].queued_tokens == 70
    fleet.take_report("d0", LoadReport(1, 1, 0, 85, 100, 0))
    d0, _ = fleet.decode_candidates([], (), 0)
    assert (d0.active, d0.free_pages) == (1, 85)
    fleet.release("d0", "r")
    assert fleet.decode_candidates([], (), 0)[0].active == 0


def test_what_was_last_known_of_a_worker_that_is_gone_is_not_exported():
    """It would stand for ever where a pool shrank: an open circuit as an alarm, free pages as no alarm."""
    metrics = RouterMetrics("tiny")
    fleet = Fleet(metrics, page_size_tokens=16)
    for index in range(2):
        fleet.add(WorkerAddress(f"d{index}", Role.DECODE, 1, "inproc://x"))
        fleet.take_report(f"d{index}", report())

    def exported(worker_id: str) -> dict[str, float]:
        return {
            sample.name: sample.value
            for metric in metrics.registry.collect()
            for sample in metric.samples
            if sample.labels.get("worker") == worker_id
        }

    load = {"circuit_state", "active_requests", "kv_cache_usage_ratio", "queued_prefill_tokens"}
    assert set(exported("d0")) == {"antiphon_worker_up", *(f"antiphon_worker_{name}" for name in load)}
    fleet.remove("d0", epoch=1)
    fleet.release("d0", "r")
    fleet.failed("d0", now=0)
    assert exported("d0") == {"antiphon_worker_up": 0}
    assert set(exported("d1")) == {"antiphon_worker_up", *(f"antiphon_worker_{name}" for name in load)}


def test_failing_worker_is_avoided_only_while_there_is_another(fleet):
    fleet.take_report("p0", report(d0=1, d1=1))
    for _ in range(3):
        fleet.failed("d0", now=0)
    assert [c.worker_id for c in fleet.decode_candidates([], (), 1)] == ["d1"]
    assert [c.worker_id for c in fleet.decode_candidates([], ("d1",), 1)] == ["d0"]


def test_an_older_life_cannot_end_a_newer_one(fleet):
    fleet.add(WorkerAddress("d0", Role.DECODE, 2, "inproc://x"))
    assert fleet.remove("d0", epoch=1) is None
    assert fleet.get("d0").address.epoch == 2
