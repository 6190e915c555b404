"""A router dies: its requests end as soon as the topology lacks it, and the other routers notice nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router_stand_in import wait_until

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
        wait_until(lambda: network.held and dying.requests[decoding].tokens, what="a write and a token")
        for worker in (pair.decode, pair.prefill):
            worker.set_topology(pair.topology(11, *everybody, router_address("router-1")))
        network.release_held()
        noticed = "requests_of_lost_routers"
        wait_until(lambda: pair.decode.status().counters.get(noticed), LEASE_S / 2, "word of its end")
        other.wait(theirs)
        assert other.requests[theirs].tokens == other.requests[theirs].expected()
        assert not other.lost
        pair.wait_idle()
    finally:
        other.stop()
