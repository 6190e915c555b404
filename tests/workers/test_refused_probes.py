"""A handshake that a prefill worker gives up after its welcome: both sides say why, nobody waits for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from mapped_network import MappedNetwork
from router_stand_in import wait_until

from antiphon.decode_worker import greeter as greeter_module
from antiphon.kv_transfer.futures import failed
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.kv_transfer.transport import Memory
from antiphon.protocol.errors import HandshakeError, TransferError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import KvHello, KvProbe, KvProbeResult, KvRefused, KvWelcome, RankMemory
from antiphon.protocol.link import Peer

Change = Callable[[RankMemory], RankMemory]


@pytest.fixture
def meet(pair_type: Any, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Start a pair on a network; ``change`` says what the decode worker tells of its memory."""

    def start(network: InProcessNetwork, change: Change = lambda memory: memory) -> Any:
        pair = pair_type(network.transport)
        request.addfinalizer(pair.stop)
        pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
        endpoint = pair.decode._kv.endpoint
        endpoint._memory = change(endpoint.memory)
        pair.publish()
        return pair

    return start


def wait_refused(pair: Any, reason: str) -> None:
    for worker in (pair.prefill, pair.decode):
        wait_until(lambda worker=worker: reason in worker.status().detail, what=reason)
        assert not worker.status().ready
    assert pair.decode.status().counters["handshakes_failed"] > 0


def test_both_sides_say_that_a_peer_is_of_another_host(meet: Any) -> None:
    wait_refused(meet(MappedNetwork(required=True, hosts={"decode-0": "another"})), "it is on another host")


def test_both_sides_say_that_metadata_is_of_another_agent(meet: Any) -> None:
    network = MappedNetwork()
    other = network.transport("decode-1/5/0")
    other.register([Memory(4096, 4096)])

    def lie(memory: RankMemory) -> RankMemory:
        return msgspec.structs.replace(memory, agent_metadata=other.metadata())

    pair = meet(network, lie)
    wait_refused(pair, f"metadata of decode-1/5/0 instead of {pair.decode._kv.endpoint.memory.agent_name}")
    assert not network.device.opened, "nothing is kept under the other's name"


def test_both_sides_say_that_more_memory_is_offered_than_there_is(meet: Any) -> None:
    network = MappedNetwork()

    def lie(memory: RankMemory) -> RankMemory:
        said = msgspec.msgpack.decode(memory.agent_metadata)
        said["offers"][0]["offset"] += 16
        return msgspec.structs.replace(memory, agent_metadata=msgspec.msgpack.encode(said))

    pair = meet(network, lie)
    wait_refused(pair, "memory that is not there is offered")
    assert network.device.closed == network.device.opened
    assert not network.device.copied_bytes


def test_both_sides_say_that_a_probe_page_is_not_there(meet: Any) -> None:
    """A peer that a prefill worker finds incompatible, which is for good."""

    def lie(memory: RankMemory) -> RankMemory:
        few = tuple(msgspec.structs.replace(region, pages=1) for region in memory.regions)
        return msgspec.structs.replace(memory, regions=few)

    pair = meet(InProcessNetwork(), lie)
    wait_refused(pair, "of decode-0, which has 1")
    assert "decode-0: refused" in pair.prefill.status().detail


class Greeted:
    """A greeter that two prefill workers have said hello to, the first of which is being probed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            greeter_module, "check_peer", lambda fingerprint, hello: Mock(agent_names=frozenset())
        )
        self.node, self.thread, self.counters = Mock(), Mock(), Counter[str]()
        self.rank = rank = Mock()
        rank.clear_probe.side_effect = lambda: self.ended(None)
        rank.check_probe.side_effect = lambda life: self.ended(0)
        rank.memory = Mock(spec=RankMemory)
        self.thread.when_done.side_effect = lambda future, act: act(future)
        self.greeter = greeter_module.PrefillGreeter(
            *(Mock(), [rank], {}, SlotAllotment(0, 0), self.node, self.thread, self.counters),
            probe_timeout_s=10.0,
            refuse_tcp=True,
        )
        self.peers = [Peer(Role.PREFILL, f"prefill-{i}", 10 + i) for i in range(2)]
        self.greeter.on_living({Writer(peer.worker_id, peer.epoch) for peer in self.peers})
        for peer in self.peers:
            self.hello(peer)

    def hello(self, peer: Peer, handshake: int = 1) -> None:
        self.greeter.on_hello(peer, KvHello(peer.worker_id, peer.epoch, Mock(), 1, (), handshake=handshake))

    def probe(self, peer: Peer, handshake: int = 1) -> None:
        self.greeter.on_probe(peer, KvProbe(peer.epoch, self.node.me.epoch, handshake=handshake))

    def refuse(self, peer: Peer, handshake: int = 1) -> None:
        self.greeter.on_refused(peer, KvRefused(["no such", "memory"], handshake))

    def ended(self, result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def welcomed(self) -> list[Peer]:
        return [peer for peer, said in self.sent() if isinstance(said, KvWelcome)]

    def sent(self) -> list[tuple[Peer, Any]]:
        return [call.args for call in self.node.send.call_args_list]


def test_a_refused_probe_makes_room_for_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    assert scene.welcomed() == [first]
    scene.refuse(first)
    assert scene.welcomed() == [first, second]
    assert scene.greeter.detail() == "prefill-0: refused: no such; memory"
    scene.hello(first, 2)  # later
    scene.probe(second)
    assert scene.welcomed() == [first, second, first]
    scene.probe(first, 2)
    assert scene.greeter.ready() == (first, second)
    assert scene.greeter.detail() == ""


def test_a_refusal_ends_nobody_elses_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    scene.refuse(second)
    assert scene.counters["stale_messages"] == 1
    assert scene.welcomed() == [first]
    assert scene.greeter.detail() == "prefill-1: waits for its probe"


def refused_at_its_hello(scene: Greeted, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(fingerprint: object, hello: object) -> None:
        raise HandshakeError("model: 'a' here, 'b' at the peer")

    with monkeypatch.context() as patch:
        patch.setattr(greeter_module, "check_peer", differ)
        scene.hello(peer, 2)
    assert (peer, KvRefused(["model: 'a' here, 'b' at the peer"], 2)) in scene.sent()


def refused_by_the_peer(scene: Greeted, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hello(peer, 2)
    scene.refuse(peer, 2)


def not_probed_in_time(scene: Greeted, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hello(peer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(greeter_module, "time", Mock(monotonic=lambda: time.monotonic() + 10.1))
        scene.greeter.tick()


def probed_in_vain(scene: Greeted, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hello(peer, 2)
    with monkeypatch.context() as patch:
        error = TransferError("handshake", "the probe page is not as it was sent")
        patch.setattr(scene.rank.check_probe, "side_effect", lambda life: failed(error))
        scene.probe(peer, 2)


def probed_over_tcp(scene: Greeted, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hello(peer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(scene.rank.check_probe, "side_effect", lambda life: scene.ended(4096))
        scene.greeter.on_probe(peer, KvProbe(peer.epoch, scene.node.me.epoch, 4096, 0.1, handshake=2))


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        (refused_at_its_hello, "model: 'a' here, 'b' at the peer"),
        (refused_by_the_peer, "no such; memory"),
        (not_probed_in_time, "its probe did not come"),
        (probed_in_vain, "not as it was sent"),
        (probed_over_tcp, "transfer.refuse_tcp is set"),
    ],
)
def test_who_was_ready_and_is_refused_is_ready_again_after_the_next_handshake(
    refuse: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    scene.probe(first)
    scene.probe(second)
    assert scene.greeter.ready() == (first, second)
    refuse(scene, first, monkeypatch)
    assert scene.greeter.ready() == (second,)
    assert scene.greeter.paths().keys() == {"prefill-1"}
    assert scene.greeter.detail().startswith("prefill-0: refused: ")
    assert reason in scene.greeter.detail()
    assert scene.counters["handshakes_failed"] == 1
    scene.hello(second, 2)
    scene.hello(first, 3)
    assert scene.welcomed()[-1] == second, "nobody's probe is waited for"
    scene.probe(second, 2)
    scene.probe(first, 3)
    assert scene.greeter.ready() == (first, second)
    assert scene.greeter.paths().keys() == {"prefill-0", "prefill-1"}
    assert scene.greeter.detail() == ""


@pytest.mark.parametrize("late", [Greeted.refuse, Greeted.probe])
@pytest.mark.parametrize("newer", ["waiting", "probed", "ready"])
def test_what_is_said_of_an_earlier_handshake_ends_no_later_one(
    newer: str, late: Callable[[Greeted, Peer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    scene.hello(first, 2)
    if newer != "waiting":  # for the probe of the other
        scene.probe(second)
    if newer == "ready":
        scene.probe(first, 2)

    def seen() -> object:
        counters = {name: count for name, count in scene.counters.items() if name != "stale_messages"}
        return scene.greeter.ready(), scene.greeter.detail(), scene.welcomed(), counters

    before = seen()
    late(scene, first)
    assert seen() == before
    assert scene.counters["stale_messages"] == 1
    told = [
        (to, said.handshake) for to, said in scene.sent() if isinstance(said, KvProbeResult) and not said.ok
    ]
    assert told == ([(first, 1)] if late is Greeted.probe else [])
    if newer == "waiting":
        scene.probe(second)
    if newer != "ready":
        scene.probe(first, 2)
    arrived = [
        (to, said.handshake) for to, said in scene.sent() if isinstance(said, KvProbeResult) and said.ok
    ]
    assert arrived == [(second, 1), (first, 2)]
    assert scene.greeter.ready() == (first, second)


def test_a_refused_hello_ends_the_probe_and_the_turn_of_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    refused_at_its_hello(scene, second, monkeypatch)
    assert scene.greeter.detail().startswith("prefill-1: refused: "), "and waits for no probe"
    scene.hello(second, 3)
    scene.probe(first, 1)
    scene.hello(first, 2)
    scene.probe(second, 3)
    assert scene.welcomed() == [first, second, first]
    scene.hello(second, 4)
    refused_at_its_hello(scene, first, monkeypatch)
    assert scene.welcomed() == [first, second, first, second]


def test_a_writer_that_is_dropped_before_its_welcome_is_none_to_stumble_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A topology comes before the end of the link that it ends."""
    scene = Greeted(monkeypatch)
    first, second = scene.peers
    cleared: Future[None] = Future()
    scene.thread.when_done.side_effect = lambda future, act: future.add_done_callback(act)
    scene.rank.clear_probe.side_effect = lambda: cleared
    scene.probe(first)
    scene.greeter.on_living({Writer(first.worker_id, first.epoch)})
    cleared.set_result(None)
    assert scene.welcomed() == [first, second]
    scene.greeter.on_lost(second)
    assert [call.args[0] for call in scene.rank.expect.call_args_list] == [1, -1, 1, -1]
