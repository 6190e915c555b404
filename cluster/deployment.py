"""One deployment from start to end: cluster, supervisor, readiness, signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import httpx

from antiphon.cluster.autoscaler import Autoscaler
from antiphon.cluster.control import ControlServer
from antiphon.cluster.operations import Operations
from antiphon.cluster.process_plan import ProcessSpec, plan_processes
from antiphon.cluster.ray_address import await_head
from antiphon.cluster.ray_cluster import Interrupted, RayCluster
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.cluster.supervisor import Supervisor
from antiphon.cluster.supervisor_metrics import SupervisorMetrics, supervisor_pages
from antiphon.cluster.upgrade import Upgrade
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role

READY_POLL_S = 0.05


class Deployment:
    """A running deployment. ``supervisor`` knows every process; ``urls`` are where the routers listen.

    ``metrics_url`` is the base of the supervisor's pages: /metrics, and /targets that names all others.
    """

    def __init__(
        self, supervisor: Supervisor, metrics_url: str = "", cluster: RayCluster | None = None
    ) -> None:
        self.supervisor = supervisor
        self.cluster = cluster
        self.metrics_url = metrics_url

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URL of each router that runs, e.g. ``http://127.0.0.1:8000``."""
        return tuple(
            m.address.endpoint
            for m in self.supervisor.members
            if m.spec.role is Role.ROUTER and m.address is not None
        )

    async def wait_ready(self) -> None:
        """Return once every router answers ``/ready`` with 200: a test page has moved between workers.

        Raises:
            AntiphonError: the supervisor gave up.
        """
        gave_up = asyncio.ensure_future(self.supervisor.failure())
        ready = asyncio.ensure_future(self._poll_ready())
        try:
            await asyncio.wait({gave_up, ready}, return_when=asyncio.FIRST_COMPLETED)
            (gave_up if gave_up.done() else ready).result()
        finally:
            gave_up.cancel()
            ready.cancel()

    async def _poll_ready(self) -> None:
        # Our own routers are asked, by address: their certificate is for the name that clients use.
        async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=False) as client:
            while True:
                answers = [await _answers_ready(client, url) for url in self.urls]
                if answers and all(answers):
                    return
                await asyncio.sleep(READY_POLL_S)


@contextlib.asynccontextmanager
async def deploy(
    resolved: ResolvedDeployment, *, stop: asyncio.Event | None = None
) -> AsyncIterator[Deployment]:
    """Start every process of a deployment; yields once all run, and ends them all on the way out.

    ``stop`` cuts the start short: what is yielded then may lack processes.

    Raises:
        ConfigError: the configuration cannot be placed, or no Ray is where it says.
        Interrupted: ``stop`` came before Ray was there.
        StartFailed: a process could not start; the message names it and the reason.
    """
    config = resolved.config
    specs = plan_processes(config)
    check_port_is_free(config)
    check_gpus_are_here(config, specs)
    stop = stop or asyncio.Event()
    await _unless_stopped(stop, await_head(config.ray.address))
    if stop.is_set():
        raise Interrupted("stopped by a signal while Ray was waited for")
    with RayCluster(resolved, specs) as cluster:
        supervisor = Supervisor(
            specs, cluster, lease_s=config.transfer.lease_s, heartbeat_s=config.transfer.heartbeat_s
        )
        metrics = SupervisorMetrics(
            config.model.name, lambda: supervisor.members, lambda: supervisor.topology
        )
        try:
            with supervisor_pages(config, metrics) as metrics_url:
                await _unless_stopped(stop, supervisor.start())
                yield Deployment(supervisor, metrics_url, cluster)
        finally:
            await supervisor.stop(config.router.drain_timeout_s)


async def serve_until_stopped(
    resolved: ResolvedDeployment,
    *,
    on_ready: Callable[[Deployment], None],
    reread: Callable[[], DeploymentConfig] | None = None,
) -> None:
    """Run a deployment until SIGINT or SIGTERM, which drain it; a second one cuts the draining short.

    ``reread`` gives the configuration as its file has it now; without it the deployment cannot be upgraded.

    Raises:
        AntiphonError: it could not start, or cannot go on.
    """
    stop = asyncio.Event()

    async def run() -> None:
        async with deploy(resolved, stop=stop) as deployment:
            await _unless_stopped(stop, deployment.wait_ready())
            if not stop.is_set():
                drain_timeout_s = resolved.config.router.drain_timeout_s
                upgrade = None
                if reread is not None and deployment.cluster is not None:
                    upgrade = Upgrade(
                        deployment.supervisor, deployment.cluster.adopt, resolved.config, reread
                    )
                operations = Operations(deployment.supervisor, drain_timeout_s, upgrade)
                async with ControlServer(operations.carry_out), autoscaling(deployment, resolved.config):
                    on_ready(deployment)
                    await _unless_stopped(stop, deployment.supervisor.failure())

    running = asyncio.create_task(run())

    def on_signal() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except Interrupted:
        return
    except asyncio.CancelledError:
        if not stop.is_set():  # somebody other than our own second signal cancelled us
            raise


@contextlib.asynccontextmanager
async def autoscaling(deployment: Deployment, config: DeploymentConfig) -> AsyncIterator[None]:
    """Let pools that may change their size follow their load for as long as the block lasts."""
    scaler = asyncio.create_task(Autoscaler(deployment.supervisor, config).run())
    scaler.add_done_callback(lambda task: task.cancelled() or task.result())  # a defect must not be silent
    try:
        yield
    finally:
        scaler.cancel()


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Wait for ``work`` or for ``stop``, whichever comes first; an error of ``work`` is raised."""
    waiting, working = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        waiting.cancel()
        working.cancel()


async def _answers_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # its server is not listening yet, or just restarted


def check_gpus_are_here(config: DeploymentConfig, specs: Sequence[ProcessSpec]) -> None:
    """Fail before anything starts when a local deployment asks for more GPUs than this machine has.

    Raises:
        ConfigError: names both numbers.
    """
    wanted = math.ceil(sum(spec.gpus * spec.ranks for spec in specs) - 1e-9)
    if wanted == 0 or config.ray.address is not None:
        return
    import torch

    found = torch.cuda.device_count()
    if wanted > found:
        raise ConfigError(f"the deployment takes {wanted} GPUs, this machine has {found}")


def check_port_is_free(config: DeploymentConfig) -> None:
    """Fail before anything starts when another program holds the port of a local deployment.

    Raises:
        ConfigError: names the port, or the host that does not exist.
    """
    host, port = config.router.host, config.router.port
    if port == 0 or config.ray.address is not None:
        return
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"router.host: {host}: {error.strerror}") from error
    with socket.socket(family, kind, number) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(f"router.port: cannot listen on {host}:{port}: {error.strerror}") from error
