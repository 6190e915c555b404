"""What runs inside each placed process: plain classes that ``ray_cluster.py`` turns into actors.

They are async so that status and topology are answered while a model loads or a queue drains; whatever blocks
runs on a thread. Heavy imports stay inside methods: this module is imported by every process of a deployment,
and a router must never load torch.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

import msgspec

from antiphon.cluster.actor_process import ActorProcess
from antiphon.cluster.lifeline import Lifeline, lifeline_s
from antiphon.cluster.logs import configure_logs
from antiphon.cluster.process import ProcessStatus
from antiphon.cluster.rank_actor import gpu_of_this_process, see_gpus
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.identity import Role, Topology, WorkerAddress
from antiphon.router.served_model import ServedModel
from antiphon.telemetry.metrics_server import MetricsServer
from antiphon.telemetry.tracing import Tracer, UnrecordedTracer, make_tracer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from antiphon.decode_worker.worker import DecodeWorker
    from antiphon.kv_transfer.transport import TransportFactory
    from antiphon.prefill_worker.worker import PrefillWorker
    from antiphon.router.server import RouterServer


WILDCARD_HOSTS = ("0.0.0.0", "::")
"""Listening on these is listening everywhere: no address to call a router by from another node."""


def tracer_of(worker_id: str, role: Role, config: DeploymentConfig) -> Tracer:
    """The tracer of a process, as the deployment says."""
    tracing = config.tracing
    return make_tracer(worker_id, role, tracing.otlp_endpoint, tracing.sample_ratio)


class NotStarted(AntiphonError):
    """A method that needs a started process was called before ``start``."""


class WorkerActor(ActorProcess):
    """Hosts one worker of the role that a subclass names."""

    ROLE: ClassVar[Role]
    transport_factory: TransportFactory | None = None
    """Makes the KV transport; absent means NIXL. Tests put one in place that loses what it is given."""

    def __init__(self, worker_id: str, config_json: str, cluster_token: str) -> None:
        self._worker_id = worker_id
        self._config = DeploymentConfig.model_validate_json(config_json)
        self._cluster_token = cluster_token
        self._worker: PrefillWorker | DecodeWorker | None = None
        self._tracer: Tracer = UnrecordedTracer()
        self._metrics: MetricsServer | None = None
        self._ranks: Store | None = None
        self._lifeline = Lifeline(lifeline_s(self._config.transfer.lease_s))

    async def gpu(self) -> str:
        """Name of rank 0's GPU."""
        return gpu_of_this_process()

    async def see_gpus(self, gpus: list[str]) -> None:
        """The GPUs of all ranks, in their order."""
        see_gpus(gpus)

    async def open_ranks(self, size: int) -> int:
        """Be rank 0 of ``size``; returns the port where the others meet it."""
        return await asyncio.to_thread(self._open_ranks, size)

    async def start(self, topology: Topology) -> WorkerAddress:
        """Load the model, build the engine and the worker, listen."""
        configure_logs(self._worker_id, self._config.log.level)
        address = await asyncio.to_thread(self._start, topology)
        self._lifeline.asked()  # loading may take longer than the supervisor lives
        return address

    async def set_topology(self, topology: Topology) -> None:
        """Tell the worker who is alive."""
        await asyncio.to_thread(self._started().set_topology, topology)

    async def status(self) -> ProcessStatus:
        """A snapshot; while the model loads, one that says so."""
        self._lifeline.asked()
        if self._worker is None:
            return ProcessStatus(self._worker_id, False, "loading the model", None, 0, 0)
        seen = await asyncio.to_thread(self._worker.status)
        return ProcessStatus(
            worker_id=self._worker_id,
            ready=seen.ready,
            detail=seen.detail,
            failed=seen.failed,
            requests=seen.requests,
            pages_held=seen.pages_held,
            overdue_writers=seen.overdue_writers,
            waiting=seen.waiting,
            queued_prefill_tokens=seen.queued_prefill_tokens,
            computed_prompt_tokens=seen.computed_prompt_tokens,
            page_use=seen.page_use,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Finish what is held, take nothing new."""
        return await asyncio.to_thread(self._started().drain, timeout_s)

    async def stop(self) -> None:
        """End the worker's threads and links."""
        if self._worker is not None:
            await asyncio.to_thread(self._stop, self._worker)

    def _stop(self, worker: PrefillWorker | DecodeWorker) -> None:
        if self._metrics is not None:
            self._metrics.close()
        worker.stop()
        self._tracer.close()

    def _open_ranks(self, size: int) -> int:
        from antiphon.model.parallel.rank_group import open_store

        self._ranks = store = open_store(0, size)
        return int(store.port)

    def _start(self, topology: Topology) -> WorkerAddress:
        from antiphon.cluster.worker_assembly import assemble_worker

        self._tracer = tracer_of(self._worker_id, self.ROLE, self._config)
        self._worker = assemble_worker(
            self.ROLE,
            self._worker_id,
            self._config,
            bind_host=self._bind_host(),
            cluster_token=self._cluster_token,
            ranks=self._ranks,
            transport_factory=self.transport_factory,
            tracer=self._tracer,
        )
        address = self._worker.start(topology)
        return msgspec.structs.replace(address, metrics_url=self._serve_metrics(self._worker))

    def _serve_metrics(self, worker: PrefillWorker | DecodeWorker) -> str:
        """Listen for scrapers; returns the URL that reaches the page from other nodes, where any can."""
        host, port = self._config.metrics.host, self._config.metrics.worker_port
        self._metrics = MetricsServer(worker.metrics.registry, host, port, several=True)
        reachable = self._bind_host() if host in WILDCARD_HOSTS else host
        return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{self._metrics.port}/metrics"

    def _bind_host(self) -> str:
        """Where the worker listens: loopback in a private cluster, its node's own address in a shared one."""
        if self._config.ray.address is None:
            return "127.0.0.1"
        import ray

        return str(ray.util.get_node_ip_address())

    def _started(self) -> PrefillWorker | DecodeWorker:
        if self._worker is None:
            raise NotStarted(f"{self._worker_id} was not started")
        return self._worker


class PrefillActor(WorkerActor):
    """Hosts one prefill worker."""

    ROLE = Role.PREFILL


class DecodeActor(WorkerActor):
    """Hosts one decode worker."""

    ROLE = Role.DECODE


class RouterActor(ActorProcess):
    """Hosts one router: HTTP on this process's event loop, links to the workers."""

    def __init__(
        self, worker_id: str, config_json: str, cluster_token: str, served_model: ServedModel
    ) -> None:
        self._worker_id = worker_id
        self._config = DeploymentConfig.model_validate_json(config_json)
        self._cluster_token = cluster_token
        self._served_model = served_model
        self._server: RouterServer | None = None
        self._lifeline = Lifeline(lifeline_s(self._config.transfer.lease_s))

    async def start(self, topology: Topology) -> WorkerAddress:
        """Load the vocabulary, listen, link to the workers; the endpoint is the API's base URL."""
        from antiphon.protocol.link import LinkSettings
        from antiphon.router.dispatch.link_gateway import LinkGateway
        from antiphon.router.harmony.formatter import HarmonyFormatter
        from antiphon.router.server import RouterServer

        configure_logs(self._worker_id, self._config.log.level)
        formatter = await asyncio.to_thread(HarmonyFormatter.configured, self._config.router)
        transfer = self._config.transfer
        gateway = LinkGateway(
            self._worker_id,
            self._cluster_token,
            LinkSettings(heartbeat_s=transfer.heartbeat_s, lease_s=transfer.lease_s),
        )
        tracer = tracer_of(self._worker_id, Role.ROUTER, self._config)
        self._server = RouterServer(self._config, self._served_model, formatter, gateway, tracer)
        await self._server.start()
        self._server.warm_encoding()
        self._lifeline.asked()
        self._server.set_topology(topology)
        url = self._reachable_url(self._server.url)
        return WorkerAddress(self._worker_id, Role.ROUTER, gateway.epoch, url, f"{url}/metrics")

    def _reachable_url(self, url: str) -> str:
        """``url``, with this node's address where the server listens on all of them."""
        parts = urlsplit(url)
        if self._config.ray.address is None or parts.hostname not in WILDCARD_HOSTS:
            return url
        import ray

        host = str(ray.util.get_node_ip_address())
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"

    async def set_topology(self, topology: Topology) -> None:
        """Tell the router who is alive."""
        if self._server is not None:
            self._server.set_topology(topology)

    async def status(self) -> ProcessStatus:
        """A snapshot."""
        self._lifeline.asked()
        server = self._server
        if server is None:
            return ProcessStatus(self._worker_id, False, "starting", None, 0, 0)
        detail = "" if server.ready else "no ready pair of a prefill and a decode worker"
        return ProcessStatus(
            self._worker_id, server.ready, detail, None, server.open_requests, 0, pairs=server.pairs
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, let open requests finish within the time, end the rest, stop listening."""
        if self._server is None:
            return True
        server, self._server = self._server, None
        began = time.monotonic()
        await server.stop(drain=timeout_s > 0)
        return time.monotonic() - began < max(timeout_s, self._config.router.drain_timeout_s)

    async def stop(self) -> None:
        """End the server; nothing is left to do after ``drain``."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(drain=False)
