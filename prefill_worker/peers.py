"""The decode workers that this prefill worker may write to: handshake, connection, probe.

    hello sent -> welcome checked -> transport connected -> probe pages written -> result ok: ready

A peer that is incompatible stays refused until the topology shows another life of it; every other failure is
tried again, later each time.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import torch

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kv_transfer.handshake import PeerKv, RankPages, check_peer
from antiphon.kv_transfer.plan import group_layouts, plan_runs
from antiphon.kv_transfer.transfer_thread import TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Copies
from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import KvHello, KvProbe, KvProbeResult, KvRefused, KvWelcome, RankMemory

_log = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0


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
    kv: PeerKv | None = None
    retry_s: float = _FIRST_RETRY_S
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LocalKv:
    """This worker's side of every handshake."""

    fingerprint: KvFingerprint
    memory: RankMemory
    pages: RankPages
    cache: PagedKvCache


class DecodePeers:
    """All decode workers that a link stands with. Lives on the link thread."""

    def __init__(
        self,
        local: LocalKv,
        node: LinkNode,
        thread: LinkThread,
        transfer: TransferThread,
        counters: Counter[str],
        on_ready: Callable[[], None],
    ) -> None:
        self._local = local
        self._node = node
        self._thread = thread
        self._transfer = transfer
        self._counters = counters
        self._on_ready = on_ready
        self._candidates: dict[Peer, _Candidate] = {}
        self._agents: dict[Peer, frozenset[str]] = {}
        """Transfer agents that were connected to, by the life they belong to."""
        self._checksums = _fill_probe_pages(local.cache, tuple(local.pages.spans))

    def ready(self) -> Mapping[Peer, PeerKv]:
        """Peers that may be written to."""
        return {
            peer: candidate.kv
            for peer, candidate in self._candidates.items()
            if candidate.state is PeerState.READY and candidate.kv is not None
        }

    def find(self, worker_id: str, epoch: int) -> tuple[Peer, PeerKv] | None:
        """The ready peer of this name and life."""
        for peer, kv in self.ready().items():
            if (peer.worker_id, peer.epoch) == (worker_id, epoch):
                return peer, kv
        return None

    def detail(self) -> str:
        """What stands in the way, for people."""
        return "; ".join(
            f"{peer.worker_id}: {c.state}{': ' + c.detail if c.detail else ''}"
            for peer, c in self._candidates.items()
            if c.state is not PeerState.READY
        )

    def on_up(self, peer: Peer) -> None:
        """A link to a decode worker stands."""
        self._candidates[peer] = _Candidate(peer)
        self._greet(peer)

    def on_lost(self, peer: Peer) -> None:
        """The link's session ended. The transport stays connected: the same life may come back."""
        self._candidates.pop(peer, None)

    def forget(self, peer: Peer) -> None:
        """This life of a decode worker is over."""
        for name in sorted(self._agents.pop(peer, frozenset())):
            self._transfer.disconnect(name)

    def on_refused(self, peer: Peer, message: KvRefused) -> None:
        """The decode worker found us incompatible."""
        self._end(peer, PeerState.REFUSED, "; ".join(message.differences))

    def on_welcome(self, peer: Peer, message: KvWelcome) -> None:
        """The decode worker told where its pages are."""
        candidate = self._candidates.get(peer)
        if candidate is None or message.epoch != peer.epoch:
            self._counters["stale_messages"] += 1
            return
        try:
            kv = check_peer(self._local.fingerprint, message)
        except HandshakeError as error:
            self._end(peer, PeerState.REFUSED, str(error))
            return
        candidate.kv, candidate.state = kv, PeerState.PROBING
        self._agents[peer] = kv.agent_names
        metadata = [memory.agent_metadata for memory in message.ranks]
        connected = self._transfer.run(lambda transport: [transport.connect(data) for data in metadata])
        self._thread.when_done(
            connected, lambda done: self._connected(peer, kv, dict(message.probe_pages), done)
        )

    def on_probe_result(self, peer: Peer, message: KvProbeResult) -> None:
        """The decode worker compared the probe pages."""
        candidate = self._candidates.get(peer)
        if (
            candidate is None
            or message.decode_epoch != peer.epoch
            or candidate.state is not PeerState.PROBING
        ):
            self._counters["stale_messages"] += 1
        elif message.ok:
            candidate.state, candidate.detail = PeerState.READY, ""
            candidate.retry_s = _FIRST_RETRY_S
            self._counters["handshakes_ok"] += 1
            _log.info("probe pages arrived intact at %s", peer)
            self._on_ready()
        else:
            self._end(peer, PeerState.FAILED, message.detail)

    # ------------------------------------------------------------------------------------------- steps

    def _greet_again(self, candidate: _Candidate) -> None:
        if self._candidates.get(candidate.peer) is candidate and candidate.state is PeerState.FAILED:
            candidate.state = PeerState.GREETING
            self._greet(candidate.peer)

    def _greet(self, peer: Peer) -> None:
        local = self._local
        hello = KvHello(
            self._node.me.worker_id,
            self._node.me.epoch,
            local.fingerprint,
            local.pages.shard.tensor_parallel,
            (local.memory,),
        )
        self._node.send(peer, hello)

    def _connected(
        self, peer: Peer, kv: PeerKv, probe_pages: dict[str, int], done: Future[list[str]]
    ) -> None:
        if done.exception() is not None:
            self._end(peer, PeerState.FAILED, str(done.exception()))
            return
        if set(done.result()) != kv.agent_names:
            self._end(peer, PeerState.FAILED, f"metadata of {done.result()} instead of {kv.agent_names}")
            return
        if set(probe_pages) != set(self._checksums):
            self._end(peer, PeerState.FAILED, f"probe pages for {sorted(probe_pages)} offered")
            return
        writes = self._plan_probe(kv, probe_pages)
        left = len(writes)

        def one_done(outcome: WriteOutcome) -> None:
            nonlocal left
            left -= 1
            if outcome.error is not None:
                self._end(peer, PeerState.FAILED, f"probe: {outcome.error}")
            elif left == 0 and peer in self._candidates:
                probe = KvProbe(self._node.me.epoch, peer.epoch, self._checksums)
                self._node.send(peer, probe)

        for rank, copies in writes:
            self._transfer.write(rank.agent_name, copies, b"", lambda o: self._thread.post(one_done, o))

    def _plan_probe(self, kv: PeerKv, probe_pages: dict[str, int]) -> list[tuple[RankPages, list[Copies]]]:
        """The writes that ship the own probe pages to every rank of a peer."""
        local, cache = self._local, self._local.cache
        writes = []
        for rank in kv.ranks:
            copies = []
            for group, layout in group_layouts(local.fingerprint).items():
                pages = [(cache.probe_page(group), probe_pages[group])]
                runs = plan_runs(layout, local.pages.shard, rank.shard, pages, range(layout.layers))
                if len(runs):
                    copies.append(Copies(local.pages.spans[group], rank.spans[group], runs))
            writes.append((rank, copies))
        return writes

    def _end(self, peer: Peer, state: PeerState, detail: str) -> None:
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.state in (PeerState.FAILED, PeerState.REFUSED):
            return
        candidate.state, candidate.detail = state, detail
        self._counters["handshakes_failed"] += 1
        _log.warning("handshake with %s: %s: %s", peer, state, detail)
        if state is PeerState.FAILED:
            self._thread.later(candidate.retry_s, self._greet_again, candidate)
            candidate.retry_s = min(candidate.retry_s * 2, _LAST_RETRY_S)


def _fill_probe_pages(cache: PagedKvCache, groups: tuple[str, ...]) -> dict[str, int]:
    """Random bytes for the own probe pages, once per life, as several peers may be probed at a time.

    Returns:
        Page group -> crc32 of its probe page.
    """
    for group in groups:
        page = cache.memory(group)[cache.probe_page(group)].view(torch.uint8)
        page.copy_(torch.randint(0, 256, page.shape, dtype=torch.uint8))
    return {group: zlib.crc32(cache.read_page(group, cache.probe_page(group))) for group in groups}
