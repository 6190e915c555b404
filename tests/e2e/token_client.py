"""A router without HTTP, and workers without a router: token ids in, token ids out, over the real links."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from greedy_reference import Case

from antiphon.cluster.process import ProcessStatus
from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.ray_cluster import ACTOR_KINDS, RayCluster
from antiphon.cluster.resolution import resolve_deployment
from antiphon.cluster.supervisor import Supervisor
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role
from antiphon.protocol.link import LinkSettings
from antiphon.router.dispatch.dispatcher import Dispatcher
from antiphon.router.dispatch.generation import Generation, GenerationEnded, OutputChannel, TokensArrived
from antiphon.router.dispatch.link_gateway import LinkGateway
from antiphon.router.lifecycle import EndKind
from antiphon.router.metrics import RouterMetrics


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    token_ids: list[int]
    end: EndKind
    attempts: int
    cached_tokens: int


class Workers:
    """A prefill and a decode worker in processes of their own, and a dispatcher in this one."""

    def __init__(self, config: DeploymentConfig, cluster: RayCluster, supervisor: Supervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        links = LinkSettings(heartbeat_s=config.transfer.heartbeat_s, lease_s=config.transfer.lease_s)
        self._gateway = LinkGateway("test-router", cluster.cluster_token, links)
        self._metrics = RouterMetrics("tiny")
        self._dispatcher = Dispatcher(
            self._gateway, config.router, config.decode.kv_cache.page_size_tokens, self._metrics
        )
        self._ids = itertools.count()
        self._following: asyncio.Task[None] | None = None
        self._told = -1

    async def start(self) -> None:
        await self._gateway.start(self._dispatcher)
        self._following = asyncio.create_task(self._follow_topology())
        await self.until_ready()

    async def until_ready(self) -> None:
        """Wait until a request would find a pair of workers that knows of the present topology."""
        async with asyncio.timeout(180):
            while True:
                told = self._told == self._supervisor.topology.version
                if told and self._dispatcher.ready:
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await self._gateway.close()

    async def answer(self, case: Case) -> Answer:
        """Run one request to its end."""
        loop = asyncio.get_running_loop()
        generation = Generation(
            request_id=f"request-{next(self._ids)}",
            choice=0,
            prompt_token_ids=list(case.prompt),
            sampling=case.sampling,
            channel=OutputChannel(),
            received_at=loop.time(),
            deadline_at=loop.time() + 120.0,
        )
        self._dispatcher.submit(generation)
        tokens: list[int] = []
        while True:
            await generation.channel.wait()
            match generation.channel.take_ready():
                case TokensArrived(_, token_ids):
                    tokens += token_ids
                case GenerationEnded(_, kind, detail):
                    assert kind in (EndKind.STOP, EndKind.LENGTH), f"{kind}: {detail}"
                    return Answer(tokens, kind, generation.attempt + 1, generation.cached_tokens)

    def retries(self, leg: Role, reason: str) -> float:
        """How often requests began a further attempt, by what ended the one before."""
        labels = {"leg": leg, "reason": reason, "model_name": "tiny"}
        return self._metrics.registry.get_sample_value("antiphon_retries_total", labels) or 0.0

    def status(self, role: Role) -> ProcessStatus:
        """The last one that the supervisor was given."""
        member = next(m for m in self._supervisor.members if m.spec.role is role)
        assert member.status is not None
        return member.status

    def epochs(self) -> dict[str, int]:
        """Worker id -> its present life, of the workers that run."""
        return {worker.worker_id: worker.epoch for worker in self._supervisor.topology.workers}

    async def idle(self) -> Mapping[Role, ProcessStatus]:
        """Wait until both workers say that they hold nothing."""
        async with asyncio.timeout(60):
            while True:
                seen = {role: self.status(role) for role in (Role.PREFILL, Role.DECODE)}
                if not any(status.requests or status.pages_held for status in seen.values()):
                    return seen
                await asyncio.sleep(0.05)

    async def _follow_topology(self) -> None:
        while True:
            topology = self._supervisor.topology
            self._gateway.set_topology(topology)
            self._told = topology.version
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running_workers(
    config: DeploymentConfig, actor_kinds: Mapping[Role, type] = ACTOR_KINDS
) -> AsyncIterator[Workers]:
    """Place the workers of a deployment, without its router, and dispatch to them from here."""
    specs = tuple(spec for spec in plan_processes(config) if spec.role is not Role.ROUTER)
    with RayCluster(resolve_deployment(config), specs, actor_kinds=actor_kinds) as cluster:
        supervisor = Supervisor(
            specs, cluster, lease_s=config.transfer.lease_s, heartbeat_s=config.transfer.heartbeat_s
        )
        try:
            await supervisor.start()
            workers = Workers(config, cluster, supervisor)
            await workers.start()
            try:
                yield workers
            finally:
                await workers.close()
        finally:
            await supervisor.stop(1.0)
