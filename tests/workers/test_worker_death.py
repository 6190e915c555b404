"""A prefill worker dies: what it may have written is not believed, and nothing is freed too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_stand_in import wait_until

from antiphon.kv_transfer.endpoint import nixl_transport
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.transport import Transport
from antiphon.protocol.codec import encode
from antiphon.protocol.kv_messages import AnnounceWrites, WriteDone, WriteKey, WritesDrained

Start = Callable[..., tuple[Any, Any]]


def test_death_is_not_inferred_from_silence_and_ends_the_quarantine(started: Start) -> None:
    network = InProcessNetwork()
    pair, router = started(network.transport)
    network.inject(Fault.HOLD, count=100)
    name = router.generate(router.random_prompt(60))
    wait_until(lambda: network.held > 0)
    old = pair.prefill
    old_agent = f"prefill-0/{pair.prefill_address.epoch:x}/0"
    router.hold_prefill = True
    old._thread.call(old._node.close)  # its links end, but the process might still write
    wait_until(lambda: pair.decode.status().counters.get("receives_stuck", 0) == 1)
    wait_until(lambda: router.requests[name].attempts == [1, 2])
    assert pair.decode.status().pages_quarantined > 0
    network.kill(old_agent)  # the supervisor killed it
    network._injections.clear()
    pair.replace_prefill()
    wait_until(lambda: pair.decode.status().pages_quarantined == 0)
    assert pair.decode.status().counters["leases_ended_by_death"] == 1
    old.stop()
    router.abort(name)
    router.wait(name)
    # A farewell may be lost with its connection; then the lease tells.
    wait_until(lambda: [peer.worker_id for peer in router.lost] == ["prefill-0"])
    router.hold_prefill = False
    router.connect(pair.prefill_address)
    again = router.generate(router.random_prompt(60))
    router.wait(again)
    assert router.requests[again].tokens == router.requests[again].expected()
    pair.wait_idle()


@pytest.mark.parametrize("over_nixl", [False, True], ids=["in process", "nixl"])
def test_nothing_is_kept_of_writers_that_are_over(over_nixl: bool, started: Start, make_config: Any) -> None:
    """Who stages is connected to, so that it can be answered: the connection, and what was said of it."""
    connected: list[set[str]] = []

    class Counted:
        """A transport that notes whom it is connected to."""

        def __init__(self, transport: Transport) -> None:
            self._transport, self._peers = transport, set[str]()
            connected.append(self._peers)

        def connect(self, metadata: bytes, expected: str = "") -> str:
            peer = self._transport.connect(metadata, expected)
            self._peers.add(peer)
            return peer

        def disconnect(self, peer: str) -> None:
            self._transport.disconnect(peer)
            self._peers.discard(peer)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    make = nixl_transport if over_nixl else InProcessNetwork().transport
    deployment = make_config(staging_slots=2, staging_slot_mib=1)
    pair, router = started(lambda name: Counted(make(name)), deployment=deployment)
    of_decode, endpoint = connected[1], pair.decode._kv.endpoint
    assert len(of_decode) == 1
    for _ in range(3):
        pair.prefill.stop()
        pair.replace_prefill()
        router.connect(pair.prefill_address)
        name = router.generate(router.random_prompt(60))
        router.wait(name)
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()
    agent = pair.prefill._kv.endpoint.memory.agent_name
    wait_until(lambda: of_decode == {agent}, what=lambda: f"the end of {of_decode - {agent}}")
    assert {life.epoch for life in endpoint._peers} == {pair.prefill_address.epoch}
    assert set(endpoint._receiver._writers) == {agent}


def test_one_of_two_prefill_workers_dies_under_load(started: Start) -> None:
    """Every request goes on with the other worker, without a gap or a repeat."""
    network = InProcessNetwork(max_delay_polls=10)
    pair, router = started(network.transport)
    second = pair._make(type(pair.prefill), "prefill-1", {})
    second_address = second.start()
    everybody = (pair.prefill_address, second_address, pair.decode_address)
    for worker in (pair.decode, pair.prefill, second):
        worker.set_topology(pair.topology(100, *everybody))
    wait_until(lambda: set(pair.decode.status().kv_peers) == {"prefill-0", "prefill-1"})
    wait_until(lambda: second.status().ready)
    router.connect(second_address)
    names = [router.generate(router.random_prompt(40 + 9 * i), max_tokens=8) for i in range(12)]
    wait_until(lambda: any(router.requests[name].prefilled for name in names))
    network.kill(f"prefill-0/{pair.prefill_address.epoch:x}/0")
    pair.prefill.stop()
    survivors = pair.topology(101, second_address, pair.decode_address)
    pair.decode.set_topology(survivors)
    second.set_topology(survivors)
    try:
        router.wait(*names)
        for name in names:
            assert router.requests[name].tokens == router.requests[name].expected(), name
        wait_until(lambda: pair.decode.status().pages_held == 0 and second.status().pages_held == 0)
        assert pair.decode.status().kv_peers == ("prefill-1",)
    finally:
        second.stop()


def test_stale_epochs_are_dropped_and_counted(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    router.hold_prefill = True
    name = router.generate(router.random_prompt(60))
    wait_until(lambda: router.requests[name].attempts == [1])
    dispatch, node = pair.decode._dispatch, pair.prefill._node
    prefill, decode = node.me, pair.decode._node.me
    key = WriteKey(0, 0, 0)

    def stale() -> int:
        return pair.decode.status().counters.get("stale_messages", 0)

    before = stale()
    node.send(decode, AnnounceWrites(name, 1, prefill.worker_id, prefill.epoch, decode.epoch + 2, 1, [key]))
    node.send(decode, AnnounceWrites(name, 1, prefill.worker_id, prefill.epoch + 2, decode.epoch, 1, [key]))
    node.send(decode, WritesDrained(name, 1, prefill.epoch, decode.epoch + 2))
    wait_until(lambda: stale() == before + 3)
    agent = f"{prefill.worker_id}/{prefill.epoch:x}/0"
    for payload in (
        WriteDone(name, 1, prefill.epoch, decode.epoch + 2, key),
        WriteDone(name, 1, prefill.epoch + 2, decode.epoch, key),
    ):
        pair.decode._thread.call(dispatch.on_notification, agent, encode(payload))
    assert stale() == before + 5
    pair.decode._thread.call(dispatch.on_notification, "nobody", encode(payload))
    pair.decode._thread.call(dispatch.on_notification, agent, b"\xff")
    counters = pair.decode.status().counters
    assert (counters["notifications_unknown"], counters["notifications_undecodable"]) == (1, 1)
    router.abort(name)
    router.wait(name)
    pair.wait_idle()


def test_only_one_writer_is_granted(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    router.hold_prefill = True
    name = router.generate(router.random_prompt(60))
    wait_until(lambda: router.requests[name].attempts == [1])
    receiver, me = pair.decode._dispatch.receiver, pair.decode._node.me
    sent: list[object] = []
    receiver._send = lambda peer, message: sent.append((peer.worker_id, type(message).__name__)) or True
    for worker in ("one", "two", "one"):
        peer = type(me)(me.role, worker, 7)
        announce = AnnounceWrites(name, 1, worker, 7, me.epoch, 1, [WriteKey(0, 0, 0)])
        pair.decode._thread.call(receiver.on_announce, peer, announce)
    assert sent == [("one", "GrantWrites"), ("two", "RefuseWrites"), ("one", "GrantWrites")]
    drained = WritesDrained(name, 1, 7, me.epoch)
    router.abort(name)
    router.wait(name)
    assert pair.decode.status().pages_quarantined > 0
    pair.decode._thread.call(receiver.on_drained, type(me)(me.role, "one", 7), drained)
    pair.wait_idle()
