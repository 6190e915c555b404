"""A router dies: its requests end as soon as the topology lacks it, and the other routers notice nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.protocol.identity import Role, WorkerAddress

Start = Callable[..., tuple[Any, Any]]

LEASE_S = 120.0


def router_address(name: str) -> WorkerAddress:
    return WorkerAddress(name, Role.ROUTER, 1, "http://127.0.0.1:1")


def test_requests_of_a_dead_router_end_long_before_its_lease(
    started: Start, router_type: Any, make_config: Any
) -> None:
    network, patient = InProcessNetwork(), make_config(lease_s=LEASE_S, completion_timeout_s=LEASE_S)
    pair, dying = started(network.transport, deployment=patient, decode_settings={"max_batch_size": 8})
    other = router_type("router-1", lease_s=LEASE_S)
    try:
        other.connect(pair.prefill_address, pair.decode_address)
        everybody = [pair.prefill_address, pair.decode_address]
        routers = [router_address("router-0"), router_address("router-1")]
        for worker in (pair.decode, pair.prefill):
            worker.set_topology(pair.topology(10, *everybody, *routers))
        theirs = other.generate(other.random_prompt(50), max_tokens=60, name="theirs")
        decoding = dying.generate(dying.random_prompt(40), max_tokens=200)
        network.inject(Fault.HOLD, match=lambda notification: b"on its way" in notification)
        dying.generate(dying.random_prompt(90), max_tokens=60, name="on its way")
        deadline = time.monotonic() + 60
        while not (network.held and dying.requests[decoding].tokens):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        began = time.monotonic()
        for worker in (pair.decode, pair.prefill):
            worker.set_topology(pair.topology(11, *everybody, router_address("router-1")))
        network.release_held()
        counters = pair.decode.status().counters
        while counters.get("requests_of_lost_routers", 0) == 0:
            assert time.monotonic() - began < LEASE_S / 2
            time.sleep(0.002)
            counters = pair.decode.status().counters
        other.wait(theirs)
        assert other.requests[theirs].tokens == other.requests[theirs].expected()
        assert not other.lost
        pair.wait_idle()
    finally:
        other.stop()
