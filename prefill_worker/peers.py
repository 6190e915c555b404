"""The decode workers that this prefill worker may write to: handshake, connection, probe.

    hello sent -> welcome checked -> transport connected -> probe pages written -> result ok: ready

A step that fails after the welcome is told, since the decode worker waits for the probe. A peer that is
incompatible stays refused until the topology shows another life of it; every other failure is tried again,
later each time. Each try is a handshake of its own number: answers to another, and steps of another that end
late, change nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from antiphon.kv_transfer.handshake import check_peer
from antiphon.kv_transfer.ranks import PeerLife, RankKv, all_of
from antiphon.kv_transfer.staging import SlotRange
from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.kv_messages import KvHello, KvProbe, KvProbeResult, KvRefused, KvWelcome
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.link_thread import LinkThread

_log = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0
TIMED_ROUNDS = 16
"""How often the probe is written against the clock."""


class PeerState(StrEnum):
    """How far the handshake with a decode worker is."""

    GREETING = "greeting"
    PROBING = "probing"
    READY = "ready"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class _Candidate:
    peer: Peer
    state: PeerState = PeerState.GREETING
    retry_s: float = _FIRST_RETRY_S
    detail: str = ""
    handshake: int = 0
    """The last one, see KvHello."""
    mapped: bool = False
    """Every rank's GPU writes straight into its pages."""
    severed: str | None = None
    """How the connection broke that it severed for this handshake, until every rank has made another."""


@dataclass(frozen=True, slots=True)
class _Probing:
    """A handshake from its welcome on."""

    peer: Peer
    handshake: int
    pages: dict[str, int]

    @property
    def life(self) -> PeerLife:
        return PeerLife(self.peer.worker_id, self.peer.epoch)


class DecodePeers:
    """All decode workers that a link stands with. Lives on the link thread."""

    def __init__(
        self,
        fingerprint: KvFingerprint,
        ranks: Sequence[RankKv],
        node: LinkNode,
        thread: LinkThread,
        counters: Counter[str],
        on_ready: Callable[[], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._ranks = ranks
        self._node = node
        self._thread = thread
        self._counters = counters
        self._on_ready = on_ready
        self._candidates: dict[Peer, _Candidate] = {}
        self._handshakes = 0
        self._connected_to: set[Peer] = set()
        """Lives that the ranks' transfer agents were told of."""
        self._broken: dict[Peer, str] = {}
        """Lives to which a connection broke, and how, until they have said that they severed it."""

    def ready(self) -> tuple[Peer, ...]:
        """Peers that may be written to."""
        return tuple(peer for peer, c in self._candidates.items() if c.state is PeerState.READY)

    def find(self, worker_id: str, epoch: int) -> Peer | None:
        """The ready peer of this name and life."""
        return next((p for p in self.ready() if (p.worker_id, p.epoch) == (worker_id, epoch)), None)

    def detail(self) -> str:
        """What stands in the way, for people."""
        return "; ".join(
            f"{peer.worker_id}: {c.state}{': ' + c.detail if c.detail else ''}"
            for peer, c in self._candidates.items()
            if c.state is not PeerState.READY
        )

    def on_up(self, peer: Peer) -> None:
        """A link to a decode worker stands."""
        self._candidates[peer] = candidate = _Candidate(peer)
        self._greet(candidate)

    def on_lost(self, peer: Peer) -> None:
        """The link's session ended. The transport stays connected: the same life may come back."""
        candidate = self._candidates.pop(peer, None)
        if candidate is not None:
            self._sever_again(candidate)

    def distrust(self, peer: Peer, reason: str) -> None:
        """A connection to a peer broke, though its link stands: a new handshake makes another."""
        if peer not in self._connected_to:
            return  # its life is over
        self._broken[peer] = reason
        candidate = self._candidates.get(peer)
        if candidate is not None and candidate.state is PeerState.READY:
            self._end(candidate, PeerState.FAILED, reason)

    def forget(self, peer: Peer) -> None:
        """This life of a decode worker is over; what it said before is not heard any more."""
        self._candidates.pop(peer, None)
        self._broken.pop(peer, None)
        if peer in self._connected_to:
            self._connected_to.remove(peer)
            for rank in self._ranks:
                rank.disconnect(PeerLife(peer.worker_id, peer.epoch))

    def on_refused(self, peer: Peer, message: KvRefused) -> None:
        """The decode worker found us incompatible."""
        candidate = self._at(peer, message.handshake, PeerState.GREETING, PeerState.PROBING, PeerState.READY)
        if candidate is None:
            self._counters["stale_messages"] += 1
        else:
            self._end(candidate, PeerState.REFUSED, "; ".join(message.differences))

    def on_welcome(self, peer: Peer, message: KvWelcome) -> None:
        """The decode worker told where its pages are."""
        candidate = self._at(peer, message.handshake, PeerState.GREETING)
        if candidate is None or message.epoch != peer.epoch:
            self._counters["stale_messages"] += 1
            return
        try:
            check_peer(self._fingerprint, message)
        except HandshakeError as error:
            self._give_up(candidate, PeerState.REFUSED, str(error))
            return
        candidate.state = PeerState.PROBING
        if message.severed:  # what breaks from here on is another connection
            candidate.severed = self._broken.pop(peer, None)
        self._connected_to.add(peer)
        probing = _Probing(peer, message.handshake, dict(message.probe_pages))
        staging = None if message.staging is None else SlotRange(*message.staging)
        them = probing.life, message.tensor_parallel, message.ranks, staging
        connected = [rank.connect(*them, severed=message.severed) for rank in self._ranks]
        self._thread.when_done(all_of(connected), lambda done: self._connected(probing, done))

    def on_probe_result(self, peer: Peer, message: KvProbeResult) -> None:
        """The decode worker compared the probe pages."""
        answers = (PeerState.PROBING,) if message.ok else (PeerState.PROBING, PeerState.GREETING)
        candidate = self._at(peer, message.handshake, *answers)
        if candidate is None or message.decode_epoch != peer.epoch:
            self._counters["stale_messages"] += 1
        elif message.ok and peer in self._broken:  # while it was being probed
            candidate.retry_s = _FIRST_RETRY_S
            self._end(candidate, PeerState.FAILED, self._broken[peer])
        elif message.ok:
            candidate.state, candidate.detail = PeerState.READY, ""
            candidate.retry_s = _FIRST_RETRY_S
            self._counters["handshakes_ok"] += 1
            _log.info("probe pages arrived intact at %s, by %s", peer, message.path)
            self._on_ready()
        else:
            self._end(candidate, PeerState.FAILED, message.detail)

    # ------------------------------------------------------------------------------------------- steps

    def _greet_again(self, candidate: _Candidate) -> None:
        if self._candidates.get(candidate.peer) is candidate and candidate.state is PeerState.FAILED:
            candidate.state = PeerState.GREETING
            self._greet(candidate)

    def _greet(self, candidate: _Candidate) -> None:
        self._handshakes += 1
        candidate.handshake = self._handshakes
        memories = tuple(rank.memory for rank in self._ranks)
        me = self._node.me
        hello = KvHello(
            *(me.worker_id, me.epoch, self._fingerprint, len(memories), memories),
            broken=candidate.peer in self._broken,
            handshake=candidate.handshake,
        )
        self._node.send(candidate.peer, hello)

    def _connected(self, probing: _Probing, done: Future[list[bool]]) -> None:
        candidate = self._going_on(probing, done)
        if candidate is None:
            return
        candidate.severed = None
        candidate.mapped = all(done.result())
        written = all_of([rank.write_probe(probing.life, probing.pages) for rank in self._ranks])
        self._thread.when_done(written, lambda done: self._written_once(probing, done))

    def _written_once(self, probing: _Probing, done: Future[list[None]]) -> None:
        """The connection stands: now the same bytes again, against the clock."""
        if self._going_on(probing, done) is None:
            return
        began = time.monotonic()
        rounds = [
            rank.write_probe(probing.life, probing.pages) for _ in range(TIMED_ROUNDS) for rank in self._ranks
        ]
        self._thread.when_done(all_of(rounds), lambda done: self._probed(probing, began, done))

    def _probed(self, probing: _Probing, began: float, done: Future[list[None]]) -> None:
        candidate = self._going_on(probing, done)
        if candidate is None:
            return
        seconds = time.monotonic() - began
        regions = [region for rank in self._ranks for region in rank.memory.regions]
        once = sum(region.page_bytes for region in regions if region.group in probing.pages)
        epochs = self._node.me.epoch, candidate.peer.epoch
        probe = KvProbe(*epochs, TIMED_ROUNDS * once, seconds, candidate.mapped, candidate.handshake)
        self._node.send(candidate.peer, probe)

    def _at(self, peer: Peer, handshake: int, *states: PeerState) -> _Candidate | None:
        """The peer, if this handshake is its last one and has come to one of these states."""
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.handshake != handshake or candidate.state not in states:
            return None
        return candidate

    def _going_on(
        self, probing: _Probing, done: Future[list[bool]] | Future[list[None]]
    ) -> _Candidate | None:
        """The peer, unless a step led nowhere: it failed, or its handshake has ended meanwhile."""
        candidate = self._at(probing.peer, probing.handshake, PeerState.PROBING)
        error = done.exception()
        if candidate is None or error is None:
            return candidate
        self._give_up(candidate, PeerState.FAILED, str(error))
        return None

    def _give_up(self, candidate: _Candidate, state: PeerState, reason: str) -> None:
        """No probe will come of a welcome."""
        self._node.send(candidate.peer, KvRefused([reason], candidate.handshake))
        self._end(candidate, state, reason)

    def _end(self, candidate: _Candidate, state: PeerState, detail: str) -> None:
        """A handshake is over that was under way or had succeeded."""
        was_ready = candidate.state is PeerState.READY
        candidate.state, candidate.detail = state, detail
        self._sever_again(candidate)
        self._counters["handshakes_failed"] += 1
        _log.warning("handshake with %s: %s: %s", candidate.peer, state, detail)
        if state is PeerState.FAILED:
            self._thread.later(candidate.retry_s, self._greet_again, candidate)
            candidate.retry_s = min(candidate.retry_s * 2, _LAST_RETRY_S)
        if was_ready:
            self._on_ready()

    def _sever_again(self, candidate: _Candidate) -> None:
        """A rank without its new connection may not know that it was severed: ask for it again."""
        if candidate.severed is not None:
            self._broken.setdefault(candidate.peer, candidate.severed)
            candidate.severed = None
