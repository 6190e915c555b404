"""The prefill worker: fills KV pages and ships them; it never samples.

Three threads: the engine's, the transport's, and the link thread, which owns every state machine here (jobs,
peers). The other two only hand over to it, so nothing below needs a lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from antiphon.configs.schema import DeploymentConfig
from antiphon.engine.events import EngineEvent, KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.kv_mapping import host_mapping
from antiphon.engine.kv_staging import make_staging
from antiphon.engine.loop import EngineLoop
from antiphon.engine.thread import EngineThread
from antiphon.kv_transfer.endpoint import nixl_transport
from antiphon.kv_transfer.mapped_transport import Side, with_same_host
from antiphon.kv_transfer.measured_transport import measured
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.kv_transfer.worker_kv import Followers, WorkerKv
from antiphon.prefill_worker.dispatch import PrefillDispatch
from antiphon.prefill_worker.metrics import PrefillMetrics
from antiphon.prefill_worker.orders import source_fence
from antiphon.prefill_worker.peers import DecodePeers
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role, Topology, WorkerAddress, new_epoch
from antiphon.protocol.link import FAREWELL, LinkNode, LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import LoadReport
from antiphon.protocol.status import WorkerStatus
from antiphon.telemetry.tracing import Tracer

_log = logging.getLogger(__name__)

EngineFactory = Callable[
    [Callable[[PagesReserved | PrefillStarted], None], Callable[[KvWritten], None]], EngineLoop
]
"""Makes the engine from the two callbacks (``on_scheduled``, ``on_kv_written``) that the worker brings."""


class PrefillWorker:
    """One prefill worker of one life (epoch). All methods are blocking and safe from any thread."""

    def __init__(
        self,
        worker_id: str,
        config: DeploymentConfig,
        engine_factory: EngineFactory,
        *,
        bind_host: str,
        cluster_token: str,
        followers: Followers | None = None,
        transport_factory: TransportFactory | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """``followers`` are the ranks other than this process's; ``transport_factory`` makes the KV transport
        from an agent name, absent means NIXL.

        Raises:
            ConfigError: the token is too short, or there are not as many ranks as the configuration says.
        """
        ranks = followers.size if followers is not None else 1
        if config.prefill.tensor_parallel != ranks:
            raise ConfigError(f"prefill.tensor_parallel {config.prefill.tensor_parallel}: {ranks} are here")
        if config.transfer.verify_checksums and config.prefill.device != "cpu":
            raise ConfigError("transfer.verify_checksums: only pages in host memory can be checked")
        self._config = config
        self._bind_host = bind_host
        self._address = WorkerAddress(worker_id, Role.PREFILL, new_epoch(), "")
        self._counters: Counter[str] = Counter()
        self._failed: str | None = None
        self._topology_version = -1
        self._routers: set[Peer] = set()
        self._dialled: dict[Peer, WorkerAddress] = {}
        self._engine = engine_factory(self._on_scheduled, self._on_kv_written)
        self._fence_device = self._engine.kv_cache.device
        self.metrics = PrefillMetrics(worker_id, config, self._engine, self.status, tracer)
        self._thread = LinkThread(f"links-{worker_id}", self._fail)
        self._engine_thread = EngineThread(self._engine, self._on_events, self._fail)
        transfer, model = config.transfer, config.model
        me = Peer(Role.PREFILL, worker_id, self._address.epoch)
        links = LinkSettings(heartbeat_s=transfer.heartbeat_s, lease_s=transfer.lease_s)
        transports = with_same_host(
            transport_factory or nixl_transport, Side.WRITES, host_mapping(config, self._fence_device)
        )
        self._fingerprint = self._engine.kv_cache.fingerprint(model.name, model.revision or "")
        self._kv = WorkerKv(
            me,
            self._fingerprint,
            self._engine.kv_cache,
            self._thread,
            cluster_token,
            links,
            followers,
            layer_groups=transfer.layer_groups,
            write_timeout_s=transfer.completion_timeout_s,
            verify_checksums=transfer.verify_checksums,
            join_timeout_s=config.ray.placement_timeout_s,
            on_notification=lambda sender, payload: self._thread.post(self._on_notification, sender, payload),
            on_failure=self._fail,
            on_write=self.metrics.transfers.observe,
            staging=make_staging(
                self._engine.kv_cache, config.staging_slots("prefill"), transfer.staging_slot_mib
            ),
            transport_factory=measured(transports, self.metrics.transfers),
        )
        self._node = LinkNode(me, cluster_token, self, links)
        self._peers: DecodePeers | None = None
        self._dispatch: PrefillDispatch | None = None
        self._started = False
        self._stopped = threading.Event()

    # ------------------------------------------------------------------------------------- public, any thread

    def start(self, topology: Topology | None = None) -> WorkerAddress:
        """Listen, start the engine's thread, connect to the topology's decode workers."""
        self._started = True
        self._thread.start()
        self._kv.start()
        endpoint = self._thread.call(self._start_links)
        self._address = WorkerAddress(self._address.worker_id, Role.PREFILL, self._address.epoch, endpoint)
        self._engine_thread.start()
        if topology is not None:
            self.set_topology(topology)
        return self._address

    def set_topology(self, topology: Topology) -> None:
        """Take a new list of living workers; a peer that is gone or has a new epoch is dead."""
        self._thread.call(self._apply_topology, topology)

    def status(self) -> WorkerStatus:
        """A snapshot."""
        return self._thread.call(self._status)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish those held; True when none is left in time."""
        self._thread.call(self._begin_drain)
        deadline = time.monotonic() + timeout_s
        while self._thread.call(lambda: len(self._running_dispatch())) > 0:
            if time.monotonic() > deadline or self._failed is not None:
                return False
            self._stopped.wait(0.02)
        return True

    def stop(self) -> None:
        """End everything this worker started."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._engine_thread.stop()
        if self._started:
            self._thread.call(self._node.close)
            self._thread.call(self._kv.close_links)
        self._kv.stop()
        self._thread.stop()

    # ------------------------------------------------------------------------------------ the engine's thread

    def _on_scheduled(self, event: PagesReserved | PrefillStarted) -> None:
        if isinstance(event, PrefillStarted):
            self._thread.post(lambda: self._running_dispatch().on_started(event))

    def _on_kv_written(self, event: KvWritten) -> None:
        mark = self._kv.issued(event.layer_group, source_fence(self._fence_device))
        self._thread.post(lambda: self._running_dispatch().on_kv_written(event, mark))

    def _on_events(self, events: list[EngineEvent]) -> None:
        self.metrics.engine.stepped(events)
        self._thread.post(lambda: self._running_dispatch().on_engine_events(events))

    def _fail(self, error: BaseException) -> None:
        """This worker is of no use any more: say so and hang up, so that its peers recover at once."""
        self._counters["failures_internal"] += 1
        if self._failed is None:
            self._failed = f"{type(error).__name__}: {error}"
            _log.error("prefill worker %s failed: %s", self._address.worker_id, self._failed)
            self._thread.post(self._node.close)

    # ------------------------------------------------------------------------------------------- link thread

    def _running_dispatch(self) -> PrefillDispatch:
        if self._dispatch is None:
            raise RuntimeError("the worker was not started")
        return self._dispatch

    def _start_links(self) -> str:
        self._peers = DecodePeers(
            self._fingerprint, self._kv.ranks, self._node, self._thread, self._counters, self._report_load
        )
        self._dispatch = PrefillDispatch(
            self._engine,
            self._node,
            self._thread,
            self._peers,
            self._kv.endpoint,
            self._kv.ranks,
            self._counters,
            self._config.transfer,
            self.metrics,
        )
        self._node.start()
        endpoint = self._node.listen(self._bind_host)
        self._beat()
        return endpoint

    def _apply_topology(self, topology: Topology) -> None:
        if topology.version <= self._topology_version:
            return
        self._topology_version = topology.version
        routers = {Peer(w.role, w.worker_id, w.epoch) for w in topology.of_role(Role.ROUTER)}
        gone, self._routers = self._routers - routers, routers
        for peer in gone:  # its requests end now, and not when its lease does
            self._node.disconnect(peer, "not in the topology any more")
        wanted = {Peer(w.role, w.worker_id, w.epoch): w for w in topology.of_role(Role.DECODE)}
        for peer in list(self._dialled):
            if wanted.get(peer) != self._dialled[peer]:
                del self._dialled[peer]
                self._node.disconnect(peer, "not in the topology any more")
                if self._peers is not None:
                    self._peers.forget(peer)
        for peer, address in wanted.items():
            if peer not in self._dialled:
                self._dialled[peer] = address
                self._node.connect(address)

    def on_up(self, peer: Peer) -> None:
        """See LinkHandler."""
        if peer.role is Role.DECODE and self._peers is not None:
            self._peers.on_up(peer)
        else:
            self._report_load()

    def on_message(self, peer: Peer, message: object) -> None:
        """See LinkHandler."""
        self._running_dispatch().on_message(peer, message)

    def _on_notification(self, sender: str, payload: bytes) -> None:
        """Nobody writes into a prefill worker."""
        self._counters["notifications_unknown"] += 1
        _log.warning("a notification of %d bytes from %s came to a prefill worker", len(payload), sender)

    def on_lost(self, peer: Peer, reason: str) -> None:
        """See LinkHandler."""
        level = logging.INFO if reason.startswith(FAREWELL) else logging.WARNING
        _log.log(level, "link to %s ended: %s", peer, reason)
        if self._peers is not None and peer.role is Role.DECODE:
            self._peers.on_lost(peer)
            self._report_load()  # routers must not pair the two any more
        self._running_dispatch().on_lost(peer, reason)

    def _begin_drain(self) -> None:
        self._running_dispatch().draining = True
        self._report_load()

    def _beat(self) -> None:
        self._running_dispatch().tick()
        self._report_load()
        self._thread.later(self._config.transfer.heartbeat_s, self._beat)

    def _report_load(self) -> None:
        snapshot = self._engine.snapshot()
        peers = self._peers.ready() if self._peers is not None else {}
        report = LoadReport(
            self._address.epoch,
            snapshot.running,
            snapshot.waiting,
            snapshot.free_pages,
            snapshot.total_pages,
            snapshot.queued_prefill_tokens,
            self._running_dispatch().draining,
            {peer.worker_id: peer.epoch for peer in peers},
        )
        for peer in self._node.peers():
            if peer.role is Role.ROUTER:
                self._node.send(peer, report)

    def _status(self) -> WorkerStatus:
        snapshot = self._engine.snapshot()
        ready = tuple(peer.worker_id for peer in self._peers.ready()) if self._peers is not None else ()
        detail = self._peers.detail() if self._peers is not None else "not started"
        links = [f"{p.worker_id}: {d}" for p in self._dialled if (d := self._node.detail(p))]
        dispatch = self._running_dispatch()
        held = ("used", "reserved", "pinned_for_transfer", "quarantined")
        return WorkerStatus(
            worker_id=self._address.worker_id,
            role=Role.PREFILL,
            epoch=self._address.epoch,
            endpoint=self._address.endpoint,
            ready=bool(ready) and self._failed is None,
            detail="; ".join(filter(None, [detail, *links])),
            draining=dispatch.draining,
            failed=self._failed,
            requests=len(dispatch),
            pages_held=sum(group.get(state, 0) for group in snapshot.pages.values() for state in held),
            pages_quarantined=sum(group.get("quarantined", 0) for group in snapshot.pages.values()),
            queued_prefill_tokens=snapshot.queued_prefill_tokens,
            waiting=snapshot.waiting,
            computed_prompt_tokens=snapshot.computed_prompt_tokens,
            page_use=1 - snapshot.free_pages / snapshot.total_pages if snapshot.total_pages else 0.0,
            kv_peers=ready,
            counters=dict(self._counters + self._node.counters),
        )
