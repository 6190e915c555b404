"""The decode worker: reserves pages, receives KV, decodes in continuous batches.

Three threads: the engine's, the transport's, and the link thread, which owns every state machine here
(requests, receives, peers). The other two only hand over to it, so nothing below needs a lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.dispatch import DecodeDispatch
from antiphon.decode_worker.greeter import PrefillGreeter
from antiphon.decode_worker.metrics import DecodeMetrics
from antiphon.decode_worker.receiver import KvReceiver
from antiphon.engine.events import EngineEvent, KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.kv_mapping import host_mapping
from antiphon.engine.kv_staging import make_staging
from antiphon.engine.loop import EngineLoop
from antiphon.engine.thread import EngineThread
from antiphon.kv_transfer.endpoint import nixl_transport
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.mapped_transport import Side, with_same_host
from antiphon.kv_transfer.ranks import PeerLife, all_of
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.kv_transfer.worker_kv import Followers, WorkerKv
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


class DecodeWorker:
    """One decode worker of one life (epoch). All methods are blocking and safe from any thread."""

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
        if config.decode.tensor_parallel != ranks:
            raise ConfigError(f"decode.tensor_parallel {config.decode.tensor_parallel}: {ranks} are here")
        if config.transfer.verify_checksums and config.decode.device != "cpu":
            raise ConfigError("transfer.verify_checksums: only pages in host memory can be checked")
        self._config = config
        self._bind_host = bind_host
        self._address = WorkerAddress(worker_id, Role.DECODE, new_epoch(), "")
        self._counters: Counter[str] = Counter()
        self._failed: str | None = None
        self._topology_version = -1
        self._living: set[Writer] = set()
        self._dropping: set[Writer] = set()
        """Dead writers of whom something staged may still be spread."""
        each = config.staging_slots("prefill")
        self._slots = SlotAllotment(config.staging_slots("decode"), each)
        self._routers: set[Peer] = set()
        self._engine = engine_factory(self._on_scheduled, lambda event: None)
        self.metrics = DecodeMetrics(worker_id, config, self._engine, self.status, tracer)
        self._thread = LinkThread(f"links-{worker_id}", self._fail)
        self._engine_thread = EngineThread(self._engine, self._on_events, self._fail)
        transfer, model = config.transfer, config.model
        me = Peer(Role.DECODE, worker_id, self._address.epoch)
        links = LinkSettings(heartbeat_s=transfer.heartbeat_s, lease_s=transfer.lease_s)
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
            on_notification=self._on_notification,
            on_failure=self._fail,
            on_write=lambda rank, sample: None,  # a decode worker is written to
            staging=make_staging(
                self._engine.kv_cache, config.staging_slots("decode"), transfer.staging_slot_mib
            ),
            transport_factory=with_same_host(
                transport_factory or nixl_transport,
                Side.IS_WRITTEN,
                host_mapping(config, self._engine.kv_cache.device),
            ),
        )
        self._node = LinkNode(me, cluster_token, self, links)
        self._greeter: PrefillGreeter | None = None
        self._dispatch: DecodeDispatch | None = None
        self._started = False
        self._stopped = threading.Event()

    # ----------------------------------------------------------------------------------- public, any thread

    def start(self, topology: Topology | None = None) -> WorkerAddress:
        """Listen, start the engine's thread, wait for prefill workers and routers to connect."""
        self._started = True
        self._thread.start()
        self._kv.start()
        endpoint = self._thread.call(self._start_links)
        self._address = WorkerAddress(self._address.worker_id, Role.DECODE, self._address.epoch, endpoint)
        self._engine_thread.start()
        if topology is not None:
            self.set_topology(topology)
        return self._address

    def set_topology(self, topology: Topology) -> None:
        """Take a new list of living workers; a prefill worker that is gone or has a new epoch is dead.

        Only workers on the list are welcomed, and a worker must leave the list only when it is dead: its
        quarantined pages are used again from then on.
        """
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

    # ------------------------------------------------------------------------- engine and transfer threads

    def _on_scheduled(self, event: PagesReserved | PrefillStarted) -> None:
        if isinstance(event, PagesReserved):
            self._thread.post(lambda: self._running_dispatch().on_reserved(event))
        else:
            self._thread.post(lambda: self._running_dispatch().on_prefill_started(event))

    def _on_events(self, events: list[EngineEvent]) -> None:
        self.metrics.engine.stepped(events)
        self._thread.post(lambda: self._running_dispatch().on_engine_events(events))

    def _on_notification(self, sender: str, payload: bytes) -> None:
        self._thread.post(lambda: self._running_dispatch().on_notification(sender, payload))

    def _fail(self, error: BaseException) -> None:
        """This worker is of no use any more: say so and hang up, so that its peers recover at once."""
        self._counters["failures_internal"] += 1
        if self._failed is None:
            self._failed = f"{type(error).__name__}: {error}"
            _log.error("decode worker %s failed: %s", self._address.worker_id, self._failed)
            self._thread.post(self._node.close)

    # ------------------------------------------------------------------------------------------ link thread

    @property
    def _alone(self) -> bool:
        """Computes every prompt itself, so that no prefill worker is waited for."""
        return self._greeter is not None and self._config.decode.local_prefill == "always"

    def _running_dispatch(self) -> DecodeDispatch:
        if self._dispatch is None:
            raise RuntimeError("the worker was not started")
        return self._dispatch

    def _start_links(self) -> str:
        transfer = self._config.transfer
        self._greeter = PrefillGreeter(
            self._fingerprint,
            self._kv.ranks,
            {group: self._engine.kv_cache.probe_page(group) for group in ("full", "sliding")},
            self._slots,
            self._node,
            self._thread,
            self._counters,
            probe_timeout_s=transfer.completion_timeout_s,
            refuse_tcp=transfer.refuse_tcp,
        )
        limit = self._config.decode.local_prefill_limit_tokens
        self._dispatch = DecodeDispatch(
            self._engine, self._node, self._greeter, self._counters, self.metrics, limit
        )
        receiver = KvReceiver(
            self._address.epoch,
            transfer.completion_timeout_s,
            self._node.send,
            self._dispatch,
            self._expect,
            self._counters,
            self._kv.endpoint.pages.spans,
            sever=self._sever,
        )
        self._dispatch.receive_through(receiver)
        self._node.start()
        endpoint = self._node.listen(self._bind_host)
        self._beat()
        self._tick()
        return endpoint

    def _expect(self, change: int) -> None:
        for rank in self._kv.ranks:
            rank.expect(change)

    def _apply_topology(self, topology: Topology) -> None:
        if topology.version <= self._topology_version or self._greeter is None:
            return
        self._topology_version = topology.version
        living = {Writer(w.worker_id, w.epoch) for w in topology.of_role(Role.PREFILL)}
        dead, self._living = self._living - living, living
        self._greeter.on_living(living)
        for peer in self._node.peers():
            if Writer(peer.worker_id, peer.epoch) in dead:
                self._node.disconnect(peer, "not in the topology any more")
        routers = {Peer(w.role, w.worker_id, w.epoch) for w in topology.of_role(Role.ROUTER)}
        gone, self._routers = self._routers - routers, routers
        for peer in gone:  # its requests end now, and not when its lease does
            self._node.disconnect(peer, "not in the topology any more")
        # Their pages change hands only when nothing that they left can reach them on any rank.
        self._dropping |= dead
        for writer in dead:
            life = PeerLife(writer.worker_id, writer.epoch)
            dropped = all_of([rank.drop_writer(life) for rank in self._kv.ranks])
            self._thread.when_done(dropped, partial(self._dropped, writer))
        self._running_dispatch().receiver.on_living_writers(self._living | self._dropping)

    def _dropped(self, writer: Writer, done: Future[list[None]]) -> None:
        done.result()  # an error here is a lost rank, which ends this worker
        self._dropping.remove(writer)
        self._slots.end(writer)
        for rank in self._kv.ranks:
            rank.disconnect(PeerLife(writer.worker_id, writer.epoch))
        self._running_dispatch().receiver.on_living_writers(self._living | self._dropping)

    def _sever(self, writer: Writer) -> None:
        """End the connections of a writer that lives, on every rank."""
        life = PeerLife(writer.worker_id, writer.epoch)
        severed = all_of([rank.sever(life) for rank in self._kv.ranks])

        def ended(done: Future[list[None]]) -> None:
            done.result()  # as above
            self._running_dispatch().receiver.on_severed(writer)

        self._thread.when_done(severed, ended)

    def on_up(self, peer: Peer) -> None:
        """See LinkHandler."""
        self._running_dispatch().on_up(peer)
        if peer.role is Role.ROUTER:
            self._report_load()

    def on_message(self, peer: Peer, message: object) -> None:
        """See LinkHandler."""
        self._running_dispatch().on_message(peer, message)

    def on_lost(self, peer: Peer, reason: str) -> None:
        """See LinkHandler."""
        level = logging.INFO if reason.startswith(FAREWELL) else logging.WARNING
        _log.log(level, "link to %s ended: %s", peer, reason)
        self._running_dispatch().on_lost(peer)

    def _begin_drain(self) -> None:
        self._running_dispatch().draining = True
        self._report_load()

    def _tick(self) -> None:
        self._running_dispatch().receiver.tick()
        if self._greeter is not None:
            self._greeter.tick()
        self._thread.later(min(0.25, self._config.transfer.completion_timeout_s / 8), self._tick)

    def _beat(self) -> None:
        self._report_load()
        self._thread.later(self._config.transfer.heartbeat_s, self._beat)

    def _report_load(self) -> None:
        snapshot = self._engine.snapshot()
        report = LoadReport(
            self._address.epoch,
            snapshot.running + snapshot.awaiting_kv,
            snapshot.waiting,
            snapshot.free_pages,
            snapshot.total_pages,
            snapshot.queued_prefill_tokens,
            self._running_dispatch().draining,
            computes_prompts=self._alone,
        )
        for peer in self._node.peers():
            if peer.role is Role.ROUTER:
                self._node.send(peer, report)

    def _status(self) -> WorkerStatus:
        snapshot = self._engine.snapshot()
        greeter, dispatch = self._greeter, self._running_dispatch()
        ready = tuple(peer.worker_id for peer in greeter.ready()) if greeter is not None else ()
        held = ("used", "reserved", "pinned_for_transfer", "quarantined")
        return WorkerStatus(
            worker_id=self._address.worker_id,
            role=Role.DECODE,
            epoch=self._address.epoch,
            endpoint=self._address.endpoint,
            ready=(bool(ready) or self._alone) and self._failed is None,
            detail="" if self._alone else greeter.detail() if greeter is not None else "not started",
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
            kv_paths=greeter.paths() if greeter is not None else {},
            counters=dict(self._counters + self._node.counters),
            overdue_writers=tuple(
                (writer.worker_id, writer.epoch)
                for writer in dispatch.receiver.overdue_writers(self._config.transfer.lease_s)
            ),
        )
