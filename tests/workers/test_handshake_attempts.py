"""Handshakes of one pair, one after the other: what is left of an earlier one changes no later one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from router_stand_in import wait_until

from antiphon.kv_transfer.futures import done
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.prefill_worker import peers as peers_module
from antiphon.protocol.errors import TransferError
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import KvHello, KvProbe, KvProbeResult, KvRefused, KvWelcome
from antiphon.protocol.link import Peer

Start = Callable[..., tuple[Any, Any]]
DECODE = Peer(Role.DECODE, "decode-0", 5)
STEPS = ["connecting", "writing", "timed"]
LATE = TransferError("write", "long after")


class Greeting:
    """A prefill worker's side, whose steps end when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers_module, "check_peer", lambda fingerprint, welcome: Mock())
        self.node, self.thread, self.rank, self.on_ready = Mock(), Mock(), Mock(), Mock()
        self.counters = Counter[str]()
        self.steps: list[Future[Any]] = []
        """Of what was begun last."""
        self.thread.when_done.side_effect = lambda future, act: future.add_done_callback(act)
        self.rank.memory.regions = ()
        self.rank.connect.side_effect = lambda *them, **how: self._step()
        self.rank.write_probe.side_effect = lambda life, pages: self._step()
        self.peers = peers_module.DecodePeers(
            *(Mock(), [self.rank], self.node, self.thread, self.counters, self.on_ready)
        )
        self.peers.on_up(DECODE)

    def _step(self) -> Future[Any]:
        self.steps.append(Future())
        return self.steps[-1]

    def hello(self) -> KvHello:
        """The last one."""
        said = [call.args[1] for call in self.node.send.call_args_list]
        return next(message for message in reversed(said) if isinstance(message, KvHello))

    def greet_again(self) -> None:
        """After its pause."""
        _, act, candidate = self.thread.later.call_args.args
        act(candidate)

    def welcome(self, severed: bool = False) -> None:
        kv = Mock(), 1, (), {}
        told = KvWelcome("decode-0", 5, *kv, severed=severed, handshake=self.hello().handshake)
        self.peers.on_welcome(DECODE, told)

    def answer(self, ok: bool) -> None:
        detail = "" if ok else "its probe did not come"
        result = KvProbeResult(5, ok, detail, handshake=self.hello().handshake)
        self.peers.on_probe_result(DECODE, result)

    def end_step(self) -> None:
        """All that was begun last ends well, and the next step begins."""
        ended, self.steps = self.steps, []
        for step in ended:
            step.set_result(True)

    def go_to(self, step: str) -> None:
        """From the hello."""
        self.welcome()
        for _ in range(STEPS.index(step)):
            self.end_step()

    def be_ready(self) -> None:
        """From the welcome."""
        while self.steps:
            self.end_step()
        assert isinstance(self.node.send.call_args.args[1], KvProbe)
        self.answer(True)
        assert self.peers.ready() == (DECODE,)

    def seen(self) -> object:
        """All that there is to see of it."""
        calls = [mock.call_args_list[:] for mock in (self.node.send, self.thread.later, self.on_ready)]
        begun = self.rank.connect.call_count, self.rank.write_probe.call_count
        return self.peers.detail(), self.peers.ready(), calls, begun, dict(self.counters)

    def go_on(self, so_far: str) -> None:
        """From the state that a later handshake has come to."""
        if so_far == "failed":
            self.greet_again()
        if so_far in ("failed", "greeting"):
            self.welcome()
        if so_far != "ready":
            self.be_ready()
        assert self.peers.ready() == (DECODE,)


def begin_another(scene: Greeting, comes_to: str) -> list[Future[Any]]:
    """The decode worker waited in vain; returns the steps of the handshake that it gave up."""
    earlier, scene.steps = scene.steps, []
    scene.answer(False)
    if comes_to != "failed":
        scene.greet_again()
    if comes_to in ("probing", "ready"):
        scene.welcome()
    if comes_to == "ready":
        scene.be_ready()
    return earlier


LATER = pytest.mark.parametrize("later", ["failed", "greeting", "probing", "ready"])


@LATER
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fails", [True, False])
def test_a_step_that_ends_late_changes_nothing(
    fails: bool, step: str, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Greeting(monkeypatch)
    scene.go_to(step)
    earlier = begin_another(scene, later)
    before = scene.seen()
    for each in earlier:
        if fails:
            each.set_exception(LATE)
        else:
            each.set_result(True)
    assert scene.seen() == before
    scene.go_on(later)


@LATER
@pytest.mark.parametrize(
    "answer",
    [
        KvWelcome("decode-0", 5, Mock(), 1, (), {}, handshake=1),
        KvRefused(["late"], 1),
        KvProbeResult(5, False, "late", handshake=1),
        KvProbeResult(5, True, "", handshake=1),
    ],
    ids=["welcome", "refused", "failed", "ok"],
)
def test_an_answer_to_an_earlier_hello_changes_nothing(
    answer: Any, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Greeting(monkeypatch)
    scene.go_to("timed")
    begin_another(scene, later)
    take: dict[type, Callable[[Peer, Any], None]] = {
        KvWelcome: scene.peers.on_welcome,
        KvRefused: scene.peers.on_refused,
        KvProbeResult: scene.peers.on_probe_result,
    }
    scene.counters["stale_messages"] += 1  # as it will be counted
    before = scene.seen()
    scene.counters["stale_messages"] -= 1
    take[type(answer)](DECODE, answer)
    assert scene.seen() == before
    scene.go_on(later)


def test_a_ready_peer_that_refuses_is_not_ready_and_routers_hear_of_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Greeting(monkeypatch)
    scene.welcome()
    scene.be_ready()
    scene.on_ready.reset_mock()
    scene.peers.on_refused(DECODE, KvRefused(["another model"], scene.hello().handshake))
    assert scene.peers.ready() == ()
    assert scene.peers.detail() == "decode-0: refused: another model"
    scene.on_ready.assert_called_once_with()


@pytest.mark.parametrize("link_lost", [False, True])
def test_a_later_handshake_severs_what_an_earlier_one_may_not_have(
    link_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether every rank has made another connection is not known while the earlier one still makes it."""
    scene = Greeting(monkeypatch)
    scene.welcome()
    scene.be_ready()
    scene.peers.distrust(DECODE, "a write failed")
    scene.greet_again()
    assert scene.hello().broken
    scene.welcome(severed=True)
    (earlier,), scene.steps = scene.steps, []
    if link_lost:
        scene.peers.on_lost(DECODE)
        scene.peers.on_up(DECODE)
    else:
        scene.answer(False)
        scene.greet_again()
    assert scene.hello().broken
    scene.welcome(severed=True)
    scene.end_step()
    before = scene.seen()
    earlier.set_exception(LATE)
    assert scene.seen() == before
    scene.be_ready()


class HeldWrites:
    """Holds the first write of a prefill worker's first two handshakes."""

    def __init__(self, prefill: Any) -> None:
        self.held: list[Future[None]] = []
        rank = prefill._kv.ranks[0]
        self._write = rank.write_probe

        def write_probe(life: Any, pages: Any) -> Future[None]:
            if len(self.held) == 2:
                return self._write(life, pages)
            self._of = life, pages
            self.held.append(Future())
            return self.held[-1]

        rank.write_probe = write_probe

    def let_go(self) -> None:
        """The second one."""
        self._write(*self._of).add_done_callback(lambda written: self.held[1].set_result(written.result()))


def wait_in_vain(decode: Any) -> None:
    """Let a decode worker see that a probe does not come: what it began is put back."""
    greeter = decode._greeter

    def put_back() -> None:
        greeter._probe.since -= 1.01 * greeter._probe_timeout_s
        greeter.tick()

    decode._thread.call(put_back)


@pytest.mark.parametrize("later", ["under way", "ready"])
def test_a_pair_outlives_a_probe_write_that_fails_late(
    later: str, pair_type: Any, request: pytest.FixtureRequest
) -> None:
    pair = pair_type(InProcessNetwork().transport)
    request.addfinalizer(pair.stop)
    pair.prefill_address, pair.decode_address = pair.prefill.start(), pair.decode.start()
    writes = HeldWrites(pair.prefill)
    pair.publish()
    wait_until(lambda: writes.held, what="the first probe")
    wait_in_vain(pair.decode)
    wait_until(lambda: "its probe did not come" in pair.prefill.status().detail, what="the word of it")
    assert "refused: its probe did not come" in pair.decode.status().detail
    wait_until(lambda: len(writes.held) == 2, what="the second probe")
    if later == "ready":
        pair.prefill._thread.call(writes.let_go)
        pair.wait_ready()
    writes.held[0].set_exception(LATE)
    for worker in (pair.prefill, pair.decode):  # whatever follows from it has been done
        worker._thread.call(lambda: None)
    if later == "under way":
        pair.prefill._thread.call(writes.let_go)
    pair.wait_ready()
    for status in pair.statuses():
        assert (status.detail, status.counters["handshakes_failed"]) == ("", 1)
        assert (status.counters["handshakes_ok"], status.counters.get("stale_messages", 0)) == (1, 0)


def test_a_pair_that_is_refused_is_not_ready_until_a_probe_arrives_again(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    me, rank = Peer(Role.PREFILL, "prefill-0", pair.prefill_address.epoch), pair.prefill._kv.ranks[0]

    def paired() -> bool:
        return bool(router.loads[me].kv_peers)

    wait_until(lambda: me in router.loads and paired(), what="that routers pair them")
    (decode,) = pair.prefill._peers.ready()
    write, rank.write_probe = rank.write_probe, lambda life, pages: done()  # which arrives nowhere
    pair.prefill._thread.call(pair.prefill._peers.distrust, decode, "a write failed")
    wait_until(lambda: "refused" in pair.decode.status().detail, what="the refusal")
    status = pair.decode.status()
    assert (status.ready, status.kv_peers, status.kv_paths) == (False, (), {})
    assert (
        "prefill-0: refused: handshake: the full probe page of rank 0 is not as it was sent" in status.detail
    )
    wait_until(lambda: not paired(), what="that routers pair them no more")
    rank.write_probe = write
    pair.wait_ready()
    assert pair.decode.status().detail == ""
    wait_until(paired, what="that routers pair them again")
    name = router.generate(router.random_prompt(40))
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()
