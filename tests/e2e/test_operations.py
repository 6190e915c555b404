"""A deployment that is changed while it serves: pools that grow and shrink, every process restarted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from antiphon.cluster.control import AskStatus, ControlServer, ScalePool, UpgradeTo
from antiphon.cluster.deployment import Deployment, autoscaling, deploy
from antiphon.cluster.member import MemberState
from antiphon.cluster.operations import Operations
from antiphon.cluster.resolution import resolve_deployment
from antiphon.cluster.supervisor import OperationFailed
from antiphon.cluster.upgrade import Upgrade
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # a crowded machine starts processes slowly
    pytest.mark.asyncio(loop_scope="module"),
]

CHECK_S = 0.1
"""Interval of the load balancer's health checks."""
OLD_S = 1.0
"""What it saw longer ago it looks at again before a request: this process may have been held up meanwhile."""
REQUEST = {
    "model": "gpt-oss-tiny",
    "messages": [{"role": "user", "content": "Sing while the choir changes. " + "alleluia " * 60}],
    "temperature": 0,
    "max_completion_tokens": 12,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(local_deployment: DeploymentConfig) -> AsyncIterator[Deployment]:
    router = local_deployment.router.model_copy(update={"replicas": 2, "drain_notice_s": 5.0})
    async with deploy(resolve_deployment(local_deployment.model_copy(update={"router": router}))) as running:
        await running.wait_ready()
        yield running


class Load:
    """Clients behind a load balancer that sends requests to routers that say they are ready."""

    def __init__(self, deployment: Deployment, clients: int) -> None:
        self._deployment = deployment
        self._clients = clients
        self._healthy: list[str] = []
        self._asking = True
        self.outcomes: Counter[str] = Counter()

    async def __aenter__(self) -> Load:
        self._http = httpx.AsyncClient(timeout=120.0, trust_env=False)
        await self._look()
        self._checking = asyncio.create_task(self._check())
        self._tasks = [asyncio.create_task(self._ask(i)) for i in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking = False
        await asyncio.gather(*self._tasks)
        self._checking.cancel()
        await self._http.aclose()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await self._look()

    async def _look(self) -> None:
        began, urls = time.monotonic(), self._deployment.urls
        ready = await asyncio.gather(*(self._ready(url) for url in urls))
        self._healthy = [url for url, is_ready in zip(urls, ready, strict=True) if is_ready]
        self._looked_at = began

    async def _ready(self, url: str) -> bool:
        try:
            return (await self._http.get(f"{url}/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def _ask(self, number: int) -> None:
        turn = number
        while self._asking:
            turn += 1
            if time.monotonic() > self._looked_at + OLD_S:
                await self._look()
            if not self._healthy:  # as where a machine has had no time for the links of any router
                routers = self._deployment.supervisor.of_role(Role.ROUTER)
                if not any(router.state is MemberState.RUNNING for router in routers):
                    self.outcomes["no router runs"] += 1
                await asyncio.sleep(CHECK_S)
                continue
            url = self._healthy[turn % len(self._healthy)]
            try:
                response = await self._http.post(f"{url}/v1/chat/completions", json=REQUEST)
                self.outcomes[str(response.status_code)] += 1
            except httpx.TransportError as error:
                self.outcomes[type(error).__name__] += 1


def epochs(deployment: Deployment) -> dict[str, int]:
    return {w.worker_id: w.epoch for w in deployment.supervisor.topology.workers}


async def antiphon(operations: Operations, *arguments: str) -> str:
    """What the command says, which asks over the deployment's socket."""
    async with ControlServer(operations.carry_out) as control:
        command = [sys.executable, "-m", "antiphon.cluster.cli", *arguments, "--socket", str(control.path)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_a_pool_grows_and_shrinks_under_load(deployment: Deployment) -> None:
    operations = Operations(deployment.supervisor, drain_timeout_s=120.0)
    async with Load(deployment, 2) as load:
        said = await antiphon(operations, "scale", "prefill=2")
        for worker_id in ("prefill-0", "prefill-1"):
            assert any(line.startswith(worker_id) and " ready," in line for line in said.splitlines()), said
        await antiphon(operations, "scale", "prefill=1")
    assert "prefill-1" not in epochs(deployment)
    assert set(load.outcomes) == {"200"}, load.outcomes
    with pytest.raises(OperationFailed, match="router: the pools are"):
        await operations.carry_out(ScalePool({"router": 3}))


async def test_a_pool_follows_its_load_by_itself(
    deployment: Deployment, local_deployment: DeploymentConfig
) -> None:
    decode = local_deployment.decode.model_copy(update={"max_replicas": 2})
    autoscale = local_deployment.autoscale.model_copy(
        update={"interval_s": 0.2, "decode_page_use": 0.001, "shrink_after_s": 0.5}
    )
    config = local_deployment.model_copy(update={"decode": decode, "autoscale": autoscale})

    async def until_there_are(workers: int) -> None:
        async with asyncio.timeout(120):
            while True:
                if sum(name.startswith("decode") for name in epochs(deployment)) == workers:
                    return
                await asyncio.sleep(0.1)

    async with autoscaling(deployment, config):
        async with Load(deployment, 2) as load:
            await until_there_are(2)
        await until_there_are(1)
    assert set(load.outcomes) == {"200"}, load.outcomes


async def test_workers_of_a_new_revision_take_over_under_load_without_a_failed_request(
    deployment: Deployment, local_deployment: DeploymentConfig
) -> None:
    assert deployment.cluster is not None
    before = epochs(deployment)
    now = resolve_deployment(local_deployment).config
    ray = now.ray.model_copy(update={"revision": "b"})
    decode = now.decode.model_copy(update={"max_batch_size": now.decode.max_batch_size - 1})
    wanted = now.model_copy(update={"ray": ray, "decode": decode})
    upgrade = Upgrade(deployment.supervisor, deployment.cluster.adopt, now, lambda: wanted)
    operations = Operations(deployment.supervisor, 120.0, upgrade)
    async with Load(deployment, 2) as load:
        answer = await operations.carry_out(UpgradeTo("b"))
    after = epochs(deployment)
    kept = {worker_id for worker_id in before if worker_id.startswith("router")}
    assert set(before) & set(after) == kept
    assert len(after) == len(before)
    assert answer.said == "2 workers were replaced by 2 of revision b"
    assert {m.spec.revision for m in deployment.supervisor.members if m.spec.worker_id not in kept} == {"b"}
    assert set(load.outcomes) == {"200"}, load.outcomes


async def test_every_process_is_restarted_under_load_without_a_failed_request(
    deployment: Deployment,
) -> None:
    operations = Operations(deployment.supervisor, drain_timeout_s=120.0)
    before = epochs(deployment)
    async with Load(deployment, 2) as load:
        said = await antiphon(operations, "roll")
    after = epochs(deployment)
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())
    assert said.startswith(f"{len(before)} processes were restarted"), said
    assert set(load.outcomes) == {"200"}, load.outcomes
    async with asyncio.timeout(120):  # what the supervisor knows is as old as its last question
        while True:
            members = (await operations.carry_out(AskStatus())).members
            if all(member.ready and not member.pages_held and not member.requests for member in members):
                break
            await asyncio.sleep(0.1)
