"""The prefill workers that may write here: who they are, whether they fit, and their probe.

Only workers that the supervisor's topology names are welcomed, so that "gone from the topology" always means
that somebody who was vouched for has died. The probe pages are one per group, so probes go one at a time.
Whoever is refused is not ready, though it was before, until a later probe of it arrives intact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from antiphon.kv_transfer.futures import without_result
from antiphon.kv_transfer.handshake import check_peer
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.ranks import PeerLife, RankKv, all_of
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.kv_messages import KvHello, KvProbe, KvProbeResult, KvRefused, KvWelcome
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.link_thread import LinkThread

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Probe:
    peer: Peer
    hello: KvHello
    since: float

    @property
    def life(self) -> PeerLife:
        return PeerLife(self.peer.worker_id, self.peer.epoch)

    @property
    def writer(self) -> Writer:
        return Writer(self.peer.worker_id, self.peer.epoch)


class PrefillGreeter:
    """All prefill workers that a link stands with. Lives on the link thread."""

    def __init__(
        self,
        fingerprint: KvFingerprint,
        ranks: Sequence[RankKv],
        probe_pages: Mapping[str, int],
        slots: SlotAllotment,
        node: LinkNode,
        thread: LinkThread,
        counters: Counter[str],
        *,
        probe_timeout_s: float,
        refuse_tcp: bool = False,
    ) -> None:
        """``refuse_tcp``: a worker whose probe came over TCP is not made ready."""
        self._refuse_tcp = refuse_tcp
        self._fingerprint = fingerprint
        self._ranks = ranks
        self._probe_pages = dict(probe_pages)
        self._slots = slots
        self._node = node
        self._thread = thread
        self._counters = counters
        self._probe_timeout_s = probe_timeout_s
        self._living: set[Writer] = set()
        self._not_vouched: dict[Peer, KvHello] = {}
        self._queue: dict[Peer, KvHello] = {}
        """Who is to be probed, in turn."""
        self._probe: _Probe | None = None
        self._agents: dict[str, Writer] = {}
        self._ready: set[Peer] = set()
        self._paths: dict[Peer, tuple[str, float]] = {}
        self._refused: dict[Peer, str] = {}

    def ready(self) -> tuple[Peer, ...]:
        """Workers whose probe arrived intact."""
        return tuple(sorted(self._ready))

    def paths(self) -> dict[str, tuple[str, float]]:
        """Ready worker -> how its KV comes, see KvProbeResult, and bytes a second in the self-test."""
        return {peer.worker_id: path for peer, path in self._paths.items()}

    def detail(self) -> str:
        """What stands in the way, for people."""
        waiting = [f"{peer.worker_id}: not in the topology yet" for peer in self._not_vouched]
        probing = [f"{peer.worker_id}: waits for its probe" for peer in self._queue]
        refused = [f"{peer.worker_id}: refused: {reason}" for peer, reason in self._refused.items()]
        return "; ".join([*waiting, *probing, *refused])

    def writer_of(self, sender: str) -> Writer | None:
        """Whose transfer agent this is."""
        return self._agents.get(sender)

    def on_living(self, living: set[Writer]) -> None:
        """Welcome who waited for being vouched for; forget the agents of those who are over."""
        self._living = living
        self._agents = {name: writer for name, writer in self._agents.items() if writer in living}
        self._queue = {p: h for p, h in self._queue.items() if Writer(p.worker_id, p.epoch) in living}
        for peer in [p for p in self._not_vouched if Writer(p.worker_id, p.epoch) in living]:
            self.on_hello(peer, self._not_vouched.pop(peer))

    def on_hello(self, peer: Peer, message: KvHello) -> None:
        """A prefill worker introduces itself, perhaps not for the first time."""
        if (message.worker_id, message.epoch) != (peer.worker_id, peer.epoch):
            self._counters["stale_messages"] += 1
            return
        if Writer(peer.worker_id, peer.epoch) not in self._living:
            self._not_vouched[peer] = message
            return
        try:
            kv = check_peer(self._fingerprint, message)
        except HandshakeError as error:
            self._node.send(peer, KvRefused(str(error).split("; "), message.handshake))
            self._queue.pop(peer, None)
            self._refuse(peer, str(error))
            return
        for name in kv.agent_names:
            self._agents[name] = Writer(peer.worker_id, peer.epoch)
        self._queue[peer] = message
        if self._probe is not None and self._probe.peer == peer:
            self._end_probe()  # it starts over
        self._next_probe()

    def on_probe(self, peer: Peer, message: KvProbe) -> None:
        """The probe pages were written: compare."""
        if message.decode_epoch != self._node.me.epoch or message.prefill_epoch != peer.epoch:
            self._counters["stale_messages"] += 1
            return
        probe = self._probe_of(peer, message.handshake)
        if probe is None:
            self._counters["stale_messages"] += 1
            self._say_failed(peer, message.handshake, "the probe came too late")
            return
        checked = all_of([rank.check_probe(probe.life) for rank in self._ranks])
        self._thread.when_done(checked, lambda done: self._checked(probe, message, done))

    def _checked(self, probe: _Probe, message: KvProbe, done: Future[list[int]]) -> None:
        if self._probe is not probe:
            return  # its link ended, or it has begun anew
        error = done.exception()
        path, rate = _path_of(message, sum(done.result()) if error is None else 0)
        detail = "" if error is None else str(error)
        if error is None and path == "tcp" and self._refuse_tcp:
            detail = f"KV would move over TCP, at {rate / 1e9:.2f} GB/s, and transfer.refuse_tcp is set"
        if detail:
            self._refuse_probe(probe, detail, path)
            return
        _log.info("KV of %s comes by %s, at %.2f GB/s", probe.peer, path, rate / 1e9)
        self._counters["handshakes_ok"] += 1
        self._ready.add(probe.peer)
        self._paths[probe.peer] = path, rate
        self._refused.pop(probe.peer, None)
        result = KvProbeResult(self._node.me.epoch, True, "", path, probe.hello.handshake)
        self._node.send(probe.peer, result)
        self._end_probe()
        self._next_probe()

    def on_refused(self, peer: Peer, message: KvRefused) -> None:
        """It cannot write here, so no probe of it comes: the next may be probed. It tries again later."""
        if self._probe_of(peer, message.handshake) is None:
            self._counters["stale_messages"] += 1
        else:
            self._refuse(peer, "; ".join(message.differences))

    def on_lost(self, peer: Peer) -> None:
        """The link's session ended. Its agent names stay known: late notifications have an owner."""
        self._ready.discard(peer)
        self._paths.pop(peer, None)
        self._not_vouched.pop(peer, None)
        self._refused.pop(peer, None)
        self._queue.pop(peer, None)
        if self._probe is not None and self._probe.peer == peer:
            self._end_probe()
        self._next_probe()

    def tick(self) -> None:
        """Do not let one silent prober keep the others out."""
        if self._probe is not None and time.monotonic() - self._probe.since > self._probe_timeout_s:
            self._refuse_probe(self._probe, "its probe did not come")

    def _next_probe(self) -> None:
        if self._probe is not None or not self._queue:
            return
        peer = next(iter(self._queue))
        self._probe = probe = _Probe(peer, self._queue.pop(peer), time.monotonic())
        self._expect(+1)
        if not probe.hello.broken:
            self._clear(probe)
            return
        # Ended before it connects anew: what it sent before must not land in a slot that it writes again.
        severed = all_of([rank.sever(probe.life) for rank in self._ranks])
        self._thread.when_done(severed, lambda done: self._severed(probe, done))

    def _severed(self, probe: _Probe, done: Future[list[None]]) -> None:
        if self._probe is not probe:
            return
        if done.exception() is not None:
            self._refuse_probe(probe, str(done.exception()))
        else:
            self._clear(probe)

    def _clear(self, probe: _Probe) -> None:
        # What an earlier probe left must not pass for this one; who stages pages has to be answered.
        ready = [rank.clear_probe() for rank in self._ranks]
        slots = self._slots.of(probe.writer)
        if slots is not None:
            them = probe.life, probe.hello.tensor_parallel, probe.hello.ranks
            connected = all_of([rank.connect(*them, granted=slots) for rank in self._ranks])
            ready.append(without_result(connected))
        self._thread.when_done(all_of(ready), lambda done: self._cleared(probe, done))

    def _cleared(self, probe: _Probe, done: Future[list[None]]) -> None:
        if self._probe is not probe:
            return
        error = done.exception()
        if error is not None:
            self._refuse_probe(probe, str(error))
            return
        me, memories = self._node.me, tuple(rank.memory for rank in self._ranks)
        slots = self._slots.of(probe.writer)
        welcome = KvWelcome(
            *(me.worker_id, me.epoch, self._fingerprint, len(memories), memories, self._probe_pages),
            None if slots is None else (slots.first, slots.count),
            severed=probe.hello.broken,
            handshake=probe.hello.handshake,
        )
        self._node.send(probe.peer, welcome)

    def _probe_of(self, peer: Peer, handshake: int) -> _Probe | None:
        """The probe under way, if it is this one: not one that was given up, or of an earlier handshake."""
        probe = self._probe
        this = probe is not None and (probe.peer, probe.hello.handshake) == (peer, handshake)
        return probe if this else None

    def _refuse_probe(self, probe: _Probe, reason: str, path: str = "") -> None:
        """It tries again later."""
        self._say_failed(probe.peer, probe.hello.handshake, reason, path)
        self._refuse(probe.peer, reason)

    def _say_failed(self, peer: Peer, handshake: int, reason: str, path: str = "") -> None:
        self._node.send(peer, KvProbeResult(self._node.me.epoch, False, reason, path, handshake))

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Its last handshake led nowhere, whatever an earlier one led to; the next may be probed."""
        self._counters["handshakes_failed"] += 1
        _log.warning("handshake with %s: refused: %s", peer, reason)
        self._refused[peer] = reason
        self._ready.discard(peer)
        self._paths.pop(peer, None)
        if self._probe is not None and self._probe.peer == peer:
            self._end_probe()
        self._next_probe()

    def _expect(self, change: int) -> None:
        for rank in self._ranks:
            rank.expect(change)

    def _end_probe(self) -> None:
        self._probe = None
        self._expect(-1)


def _path_of(message: KvProbe, received_bytes: int) -> tuple[str, float]:
    """How the probe really came, and at how many bytes/s: what UCX chose, not what it was asked for."""
    over_tcp = 0 < message.written_bytes <= 2 * received_bytes
    rate = message.written_bytes / message.seconds if message.seconds > 0 else 0.0
    return "mapped" if message.mapped else "tcp" if over_tcp else "direct", rate
