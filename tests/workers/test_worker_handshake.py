"""Readiness: only workers whose KV means the same, and whose probe pages arrive, ship to each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from router_stand_in import wait_until as until

from antiphon.decode_worker import greeter as greeter_module
from antiphon.decode_worker.receiver import ReceiveState
from antiphon.kv_transfer.arrivals import ArrivedConnections
from antiphon.kv_transfer.futures import done, failed
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.prefill_worker import peers as peers_module
from antiphon.prefill_worker.peers import TIMED_ROUNDS
from antiphon.protocol.errors import ConfigError, TransferError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import KvHello, KvProbeResult, KvWelcome
from antiphon.protocol.link import Peer

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
    network.inject(Fault.CORRUPT, count=10**6)  # every write of the first handshake, and of those after it
    start_without_waiting(pair)
    until(lambda: pair.prefill.status().counters.get("handshakes_failed", 0) > 0)
    assert not pair.prefill.status().ready
    assert not pair.decode.status().ready
    network._injections.clear()
    pair.wait_ready()
    assert network.happened[Fault.CORRUPT] >= 1 + TIMED_ROUNDS


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
    pair.wait_ready()


def test_an_engine_that_raises_fails_the_worker_and_its_peers_notice(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)

    receiver = pair.decode._dispatch.receiver

    def explode() -> None:
        until(lambda: receiver.state(("request-0", 1)) is ReceiveState.RECEIVING)
        raise ZeroDivisionError("a defect")

    pair.models[0].interrupt = explode
    name = router.generate(router.random_prompt(60), name="request-0")
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


def test_a_permission_that_does_not_come_is_not_waited_for_for_ever(started: Start, make_config: Any) -> None:
    pair, router = started(InProcessNetwork().transport)
    receiver, dispatch = pair.decode._dispatch.receiver, pair.prefill._dispatch
    answer, receiver.on_announce = receiver.on_announce, lambda peer, message: None
    patient, dispatch._settings = dispatch._settings, make_config(lease_s=0.2).transfer  # of this wait alone
    name = router.generate(router.random_prompt(40))
    router.wait_prefill_failed(name)
    failure = router.requests[name].prefill_failures[0]
    assert (failure.stage, failure.reason) == ("reserve", "no permission to write within 0.2 s")
    dispatch._settings = patient
    receiver.on_announce = answer
    router.wait(name)  # the ticket is still good
    assert router.requests[name].attempts == [1]
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_transport_that_cannot_open_fails_the_start_and_leaves_no_thread(pair_type: Any) -> None:
    def refuse(agent_name: str) -> Any:
        raise TransferError("handshake", f"no device for {agent_name}")

    pair = pair_type(refuse)
    for worker in (pair.prefill, pair.decode):
        with pytest.raises(TransferError, match="no device"):
            worker.start()
        worker.stop()
        worker.stop()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("engine", "kv-transfer", "links-"))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_bad_settings_are_named_before_anything_starts(pair_type: Any, make_config: Any, role: str) -> None:
    base = make_config()
    wide = base.model_copy(update={role: getattr(base, role).model_copy(update={"tensor_parallel": 2})})
    with pytest.raises(ConfigError, match=rf"{role}\.tensor_parallel 2"):
        pair_type(InProcessNetwork().transport, wide)
    cuda = make_config(verify_checksums=True)
    cuda = cuda.model_copy(update={role: getattr(cuda, role).model_copy(update={"device": "cuda"})})
    with pytest.raises(ConfigError, match=r"transfer\.verify_checksums"):
        pair_type(InProcessNetwork().transport, cuda)


def test_the_self_test_says_how_kv_moves_and_how_fast(started: Start) -> None:
    pair, _ = started(None)
    path, bytes_per_s = pair.decode.status().kv_paths["prefill-0"]
    assert path == "direct"
    assert bytes_per_s > 0


def test_a_pair_that_would_exchange_kv_over_tcp_is_refused_where_that_is_asked_for(
    make_pair: Callable[..., Any], make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArrivedConnections, "received_bytes", lambda self, writer: 1 << 40)
    over_tcp = make_pair(InProcessNetwork().transport)
    start_without_waiting(over_tcp)
    until(lambda: over_tcp.decode.status().ready)
    assert over_tcp.decode.status().kv_paths["prefill-0"][0] == "tcp"
    refusing = make_pair(InProcessNetwork().transport, make_config(refuse_tcp=True))
    start_without_waiting(refusing)
    until(lambda: "refuse_tcp is set" in refusing.prefill.status().detail)
    assert not refusing.decode.status().ready
    assert "over TCP" in refusing.decode.status().detail


def test_prefill_workers_that_die_together_leave_nobody_to_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that a topology drops at once, the link of the one being probed may be ended first."""
    monkeypatch.setattr(
        greeter_module, "check_peer", lambda fingerprint, hello: Mock(agent_names=frozenset())
    )
    rank = Mock()
    rank.clear_probe.side_effect = Future
    node, thread, counters = Mock(), Mock(), Counter[str]()
    greeter = greeter_module.PrefillGreeter(
        *(Mock(), [rank], {}, SlotAllotment(0, 0), node, thread, counters), probe_timeout_s=10.0
    )
    peers = [Peer(Role.PREFILL, f"prefill-{i}", 10 + i) for i in range(2)]
    greeter.on_living({Writer(peer.worker_id, peer.epoch) for peer in peers})
    for peer in peers:
        greeter.on_hello(peer, KvHello(peer.worker_id, peer.epoch, Mock(), 1, ()))
    assert greeter.detail() == "prefill-1: waits for its probe"
    greeter.on_living(set())
    for peer in peers:
        greeter.on_lost(peer)
    assert greeter.detail() == ""
    assert [call.args[0] for call in rank.expect.call_args_list] == [1, -1]


def test_a_decode_worker_that_is_gone_is_not_connected_by_the_welcome_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait its turn while the topology drops its sender; nobody would unmap those pages again."""
    monkeypatch.setattr(peers_module, "check_peer", lambda fingerprint, welcome: Mock())
    rank, counters, peer = Mock(), Counter[str](), Peer(Role.DECODE, "decode-0", 5)
    rank.connect.side_effect = lambda *them, **how: Future()
    peers = peers_module.DecodePeers(Mock(), [rank], Mock(), Mock(), counters, lambda: None)
    welcome = KvWelcome("decode-0", 5, Mock(), 1, (), {}, handshake=1)
    peers.on_up(peer)
    peers.on_welcome(peer, welcome)
    peers.forget(peer)
    peers.on_welcome(peer, welcome)
    peers.on_lost(peer)
    assert (rank.connect.call_count, rank.disconnect.call_count) == (1, 1)
    assert counters["stale_messages"] == 1


def test_what_was_severed_is_severed_again_where_no_connection_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank hears of it with its new connection, and until then uses none of its slots that were lost."""
    monkeypatch.setattr(peers_module, "check_peer", lambda fingerprint, welcome: Mock())
    rank, node, thread, peer = Mock(), Mock(), Mock(), Peer(Role.DECODE, "decode-0", 5)
    rank.memory.regions = ()
    rank.write_probe.side_effect = lambda life, pages: done()
    thread.when_done.side_effect = lambda future, act: act(future)
    peers = peers_module.DecodePeers(Mock(), [rank], node, thread, Counter(), lambda: None)

    def hello() -> KvHello:
        said = [call.args[1] for call in node.send.call_args_list]
        return next(message for message in reversed(said) if isinstance(message, KvHello))

    def welcome(severed: bool, connected: Future[Any]) -> None:
        rank.connect.side_effect = lambda *them, **how: connected
        kv = Mock(), 1, (), {}
        told = KvWelcome("decode-0", 5, *kv, severed=severed, handshake=hello().handshake)
        peers.on_welcome(peer, told)

    def arrived() -> None:
        peers.on_probe_result(peer, KvProbeResult(5, True, "", handshake=hello().handshake))

    def greet_again() -> None:
        _, act, candidate = thread.later.call_args.args
        act(candidate)

    mapped: Future[bool] = Future()
    mapped.set_result(True)
    peers.on_up(peer)
    welcome(False, mapped)
    arrived()
    assert peers.ready() == (peer,)
    peers.distrust(peer, "a write failed")
    greet_again()
    assert hello().broken
    welcome(True, failed(TransferError("handshake", "no connection")))
    greet_again()
    assert hello().broken
    welcome(True, mapped)
    assert rank.connect.call_args.kwargs == {"severed": True}
    arrived()
    assert peers.ready() == (peer,)
    peers.on_lost(peer)
    peers.on_up(peer)
    welcome(True, failed(TransferError("handshake", "no connection")))
    greet_again()
    assert not hello().broken, "nothing broke since"
