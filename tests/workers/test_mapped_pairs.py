"""Workers of one host: KV is written straight into the pages, and the way is said and held to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from mapped_network import MappedNetwork
from router_stand_in import wait_until

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.step_fences import DeviceFence
from antiphon.prefill_worker import worker as worker_module

Start = Callable[..., tuple[Any, Any]]
PROMPT = [token % 30 for token in range(2, 90)]


def tokens(router: Any) -> list[int]:
    name = router.generate(PROMPT, max_tokens=5)
    router.wait(name)
    found: list[int] = router.requests[name].tokens
    return found


def test_pages_are_written_directly_and_both_sides_say_so(started: Start) -> None:
    plain, plain_router = started(InProcessNetwork().transport)
    network = MappedNetwork(required=True)
    pair, router = started(network.transport)
    said = tokens(router)
    assert said == tokens(plain_router)
    assert len(said) == 5
    pair.wait_idle()
    path, bytes_per_s = pair.decode.status().kv_paths["prefill-0"]
    assert (path, plain.decode.status().kv_paths["prefill-0"][0]) == ("mapped", "direct")
    assert bytes_per_s > 0
    sent = pair.prefill.status().counters["bytes_sent"]
    assert network.device.copied_bytes > sent > 0, "the probe's bytes too"
    (mapped,) = (
        sample.value
        for family in pair.decode.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "antiphon_kv_peers_mapped"
    )
    assert mapped == 1


def test_a_worker_of_another_host_is_refused_where_the_same_is_required(
    pair_type: Any, request: pytest.FixtureRequest
) -> None:
    pair = pair_type(MappedNetwork(required=True, hosts={"decode-0": "another"}).transport)
    request.addfinalizer(pair.stop)
    pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
    pair.publish()
    wait_until(lambda: "it is on another host" in pair.prefill.status().detail)
    assert "transfer.same_host required" in pair.prefill.status().detail
    assert not pair.prefill.status().ready
    assert not pair.decode.status().ready


def test_a_wrong_mapping_is_caught_by_the_probe(pair_type: Any, request: pytest.FixtureRequest) -> None:
    network = MappedNetwork()
    # The probe's page is the last one, so this still lies within the pages.
    network.device.open = lambda handle: (int(handle) - 16, None)  # type: ignore[method-assign]
    pair = pair_type(network.transport)
    request.addfinalizer(pair.stop)
    pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
    pair.publish()
    wait_until(lambda: "probe page of rank 0 is not as it was sent" in pair.prefill.status().detail)
    assert not pair.prefill.status().ready


def test_pages_of_a_life_that_is_over_are_unmapped_once_no_copy_into_them_is_left(started: Start) -> None:
    network = MappedNetwork()
    pair, router = started(network.transport)
    device = network.device
    first = set(device.opened)
    device.goes_on.clear()
    router.generate(PROMPT, max_tokens=5)
    wait_until(lambda: pair.prefill.status().requests == 1 and device.copied_bytes > 0)
    wait_until(lambda: len(pair.prefill._kv.endpoint._transfer._in_flight) > 0)
    old = pair.decode
    old.stop()
    network.kill("decode-0")
    pair.decode = pair._make(type(old), "decode-0", {})
    pair.decode_address = pair.decode.start()
    pair.publish()
    time.sleep(0.1)
    assert not device.closed, "a copy into them is under way"
    device.goes_on.set()
    wait_until(lambda: set(device.closed) == first)
    wait_until(lambda: all(status.ready for status in pair.statuses()))
    assert set(device.opened) > first
    assert all(device.opened[handle] == device.closed[handle] == 1 for handle in first)


def test_pages_of_an_aborted_request_are_kept_while_its_copies_wait_for_the_gpu(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were given to the GPU ahead of what computes their source, and nothing can take them back."""
    network, computed = MappedNetwork(), threading.Event()
    pair, router = started(network.transport)
    fence = DeviceFence(computed.is_set, 77, computed)
    monkeypatch.setattr(worker_module, "source_fence", lambda device: fence)
    network.device.goes_on.clear()
    name = router.generate(PROMPT, max_tokens=5)
    wait_until(lambda: network.device.waited_for.count(77) > 1)
    router.abort(name)
    router.wait(name)
    wait_until(lambda: all(status.pages_quarantined > 0 for status in pair.statuses()))
    for ends in (computed, network.device.goes_on):
        time.sleep(0.2)
        assert all(status.pages_quarantined > 0 for status in pair.statuses())
        ends.set()
    pair.wait_idle()
