"""Processes as Ray actors: placement, death, errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import stand_in_actors

from antiphon.cluster.process import ProcessDied, StartFailed
from antiphon.cluster.process_plan import ProcessSpec, plan_processes
from antiphon.cluster.ray_cluster import RayCluster
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.cluster.supervisor import Supervisor
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role, Topology
from antiphon.router.served_model import ServedModel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

STAND_INS = Path(__file__).parent / "stand_ins"
NOBODY = Topology(0, ())
KINDS = {
    Role.PREFILL: stand_in_actors.StandInActor,
    Role.DECODE: stand_in_actors.StandInDecode,
    Role.ROUTER: stand_in_actors.StandInRouter,
}
"""Stand-ins for every role."""


def resolved(**sections: object) -> ResolvedDeployment:
    config = DeploymentConfig.model_validate(
        {"model": {"path": "nowhere"}, "router": {"port": 0}, **sections}
    )
    return ResolvedDeployment(config, ServedModel("nothing", 1024, 0, "fp_0"))


@pytest.fixture(scope="module")
def specs() -> tuple[ProcessSpec, ...]:
    return plan_processes(resolved().config)


@pytest.fixture(scope="module")
def cluster(specs: tuple[ProcessSpec, ...]) -> Iterator[RayCluster]:
    os.environ["PYTHONPATH"] = str(STAND_INS)
    before = set(psutil.Process().children(recursive=True))
    try:
        with RayCluster(resolved(), specs, actor_kinds=KINDS) as cluster:
            folder = cluster.folder
            assert folder is not None
            yield cluster
    finally:
        del os.environ["PYTHONPATH"]
    assert not folder.exists()
    assert not os.environ.get("RAY_AUTH_TOKEN")
    deadline = time.monotonic() + 60
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def spec_of(specs: tuple[ProcessSpec, ...], role: Role) -> ProcessSpec:
    return next(spec for spec in specs if spec.role is role)


async def test_each_process_is_one_of_its_own(cluster: RayCluster, specs: tuple[ProcessSpec, ...]) -> None:
    handles = [cluster.launch(spec) for spec in specs]
    addresses = [await handle.start(NOBODY) for handle in handles]
    assert [address.role for address in addresses] == [Role.PREFILL, Role.DECODE, Role.ROUTER]
    pids = {(await handle.status()).requests for handle in handles}
    assert len(pids) == 3
    assert os.getpid() not in pids
    await handles[0].set_topology(Topology(1, tuple(addresses[:2])))
    status = await handles[0].status()
    assert status.detail == "decode-0,prefill-0"
    assert status.pages_held >= 32  # the length of the secret that was handed over
    for handle in handles:
        handle.kill()
        assert await handle.wait_dead()


async def test_sigkill_is_noticed_at_once(cluster: RayCluster, specs: tuple[ProcessSpec, ...]) -> None:
    handle = cluster.launch(spec_of(specs, Role.PREFILL))
    address = await handle.start(NOBODY)
    began = time.monotonic()
    os.kill(int(address.endpoint.removeprefix("pid:")), signal.SIGKILL)
    assert await handle.wait_dead()
    assert time.monotonic() - began < 60.0
    with pytest.raises(ProcessDied):
        await handle.status()
    handle.kill()  # harmless


async def test_a_restart_fits_where_the_dead_life_was(
    cluster: RayCluster, specs: tuple[ProcessSpec, ...]
) -> None:
    spec = spec_of(specs, Role.DECODE)
    first = cluster.launch(spec)
    epoch = (await first.start(NOBODY)).epoch
    first.kill()
    await first.wait_dead()
    second = cluster.launch(spec)
    assert (await second.start(NOBODY)).epoch != epoch
    second.kill()
    await second.wait_dead()


async def test_an_error_made_for_users_is_final_and_a_defect_is_not(
    cluster: RayCluster, specs: tuple[ProcessSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {**KINDS, Role.DECODE: stand_in_actors.Unstartable, Role.PREFILL: stand_in_actors.Defective}
    monkeypatch.setattr(cluster, "_actor_kinds", kinds)
    unstartable = cluster.launch(spec_of(specs, Role.DECODE))
    with pytest.raises(StartFailed, match=r"^model\.safetensors: truncated$"):
        await unstartable.start(NOBODY)
    defective = cluster.launch(spec_of(specs, Role.PREFILL))
    with pytest.raises(ProcessDied, match="a defect"):
        await defective.start(NOBODY)
    for handle in (unstartable, defective):
        handle.kill()
        await handle.wait_dead()


async def test_the_supervisor_replaces_a_killed_actor(
    cluster: RayCluster, specs: tuple[ProcessSpec, ...]
) -> None:
    supervisor = Supervisor(specs, cluster, lease_s=60.0, heartbeat_s=0.1)
    await supervisor.start()
    try:
        before = {w.worker_id: w for w in supervisor.topology.workers}
        os.kill(int(before["decode-0"].endpoint.removeprefix("pid:")), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            after = {w.worker_id: w for w in supervisor.topology.workers}
            if "decode-0" in after and after["decode-0"] != before["decode-0"]:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert after["prefill-0"] == before["prefill-0"]
        assert after["decode-0"].epoch != before["decode-0"].epoch
    finally:
        await supervisor.stop(1.0)
