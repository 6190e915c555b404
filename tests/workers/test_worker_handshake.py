"""Readiness: only workers whose KV means the same, and whose probe pages arrive, ship to each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.kv_transfer.in_process import Fault, InProcessNetwork

Start = Callable[..., tuple[Any, Any]]


@pytest.fixture
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*arguments: Any, **named: Any) -> Any:
        made.append(request.getfixturevalue("pair_type")(*arguments, **named))
        return made[-1]

    yield make
    for pair in made:
        pair.stop()


def start_without_waiting(pair: Any) -> None:
    pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
    pair.publish()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_model_is_refused_with_both_values(make_pair: Any, make_config: Any) -> None:
    pair = make_pair(InProcessNetwork().transport)
    other = make_config().model_copy(
        update={"model": make_config().model.model_copy(update={"revision": "v2"})}
    )
    pair.config = other
    pair.decode = pair._make(type(pair.decode), "decode-0", {})
    start_without_waiting(pair)
    until(lambda: "refused" in pair.prefill.status().detail)
    for status in pair.statuses():
        assert not status.ready
        assert "revision: 'v2' here, '' at the peer" in status.detail


def test_a_corrupt_probe_is_tried_again_before_anybody_is_ready(make_pair: Any) -> None:
    network = InProcessNetwork()
    pair = make_pair(network.transport)
    network.inject(Fault.CORRUPT)
    start_without_waiting(pair)
    until(lambda: pair.prefill.status().counters.get("handshakes_failed", 0) == 1)
    assert not pair.prefill.status().ready
    assert not pair.decode.status().ready
    until(lambda: all(status.ready for status in pair.statuses()))
    assert network.happened[Fault.CORRUPT] == 1


def test_a_worker_that_nobody_vouches_for_is_not_welcomed(make_pair: Any) -> None:
    pair = make_pair(InProcessNetwork().transport)
    pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
    pair.version += 1
    only_decode = type(pair).topology(pair.version, pair.decode_address)
    pair.decode.set_topology(only_decode)
    pair.prefill.set_topology(only_decode)
    until(lambda: pair.decode.status().detail == "prefill-0: not in the topology yet")
    assert not pair.decode.status().ready
    pair.publish()
    until(lambda: all(status.ready for status in pair.statuses()))


def test_an_engine_that_raises_fails_the_worker_and_its_peers_notice(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)

    def explode() -> None:
        raise ZeroDivisionError("a defect")

    pair.models[0].interrupt = explode
    name = router.generate(router.random_prompt(60))
    until(lambda: pair.prefill.status().failed == "ZeroDivisionError: a defect")
    assert not pair.prefill.status().ready
    until(lambda: [peer.worker_id for peer in router.lost] == ["prefill-0"])
    until(lambda: router.requests[name].attempts[-1] == 2)  # decode moved on
    pair.prefill.stop()
    pair.replace_prefill()
    until(lambda: pair.decode.status().pages_quarantined == 0)
    router.abort(name)
    router.wait(name)
    pair.wait_idle()
