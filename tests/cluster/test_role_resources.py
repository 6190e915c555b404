"""Processes that may run only on the nodes of their role, in a Ray cluster that somebody else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pydantic
import pytest

from antiphon.cluster.process_plan import ProcessSpec, plan_processes
from antiphon.cluster.ray_cluster import RayCluster, bundle_of, ray_token, role_resource
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role
from antiphon.router.served_model import ServedModel


def config_for(address: str, **ray: object) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "model": {"path": "nowhere"},
            "router": {"port": 0},
            "ray": {"address": address, "role_resources": True, **ray},
        }
    )


def test_a_bundle_names_the_role_only_when_asked() -> None:
    spec = ProcessSpec("prefill-0", Role.PREFILL, 2, 4, 2)
    assert bundle_of(spec, role_resources=False) == {"CPU": 2.0, "GPU": 4.0}
    assert bundle_of(spec, role_resources=True) == {"CPU": 2.0, "GPU": 4.0, "antiphon_prefill": 1.0}
    new = replace(spec, revision="b")
    assert bundle_of(new, role_resources=True) == {"CPU": 2.0, "GPU": 4.0, "antiphon_prefill_b": 1.0}
    assert bundle_of(spec, rank=1, role_resources=True) == {"CPU": 2.0, "GPU": 4.0}


def test_a_cluster_of_our_own_has_no_role_resources() -> None:
    with pytest.raises(pydantic.ValidationError, match="role_resources needs address"):
        DeploymentConfig.model_validate({"model": {"path": "nowhere"}, "ray": {"role_resources": True}})


def test_a_revision_is_of_workers_alone() -> None:
    plan = plan_processes(config_for("auto", revision="b"))
    assert {spec.role: spec.revision for spec in plan} == {
        Role.PREFILL: "b",
        Role.DECODE: "b",
        Role.ROUTER: "",
    }


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A head that runs nothing, a node per role and one of a revision, all here; yields the address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_token())
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
            cluster.add_node(num_cpus=1, num_gpus=0, resources={f"antiphon_{role}": 1})
        cluster.add_node(num_cpus=1, num_gpus=0, resources={"antiphon_prefill_b": 1})
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.e2e
def test_every_process_is_placed_on_a_node_of_its_role(nodes: str) -> None:
    import ray

    config = config_for(nodes)
    specs = plan_processes(config)
    new = replace(specs[0], worker_id="prefill-1", revision="b")
    with RayCluster(ResolvedDeployment(config, ServedModel("nothing", 1024, 0, "fp_0")), specs) as cluster:
        cluster.adopt(config_for(nodes, revision="b"))
        asyncio.run(cluster.make_room(new))
        resources = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        resource_of = {spec.worker_id: role_resource(spec) for spec in (*specs, new)}
        placed = {
            resource_of[group["name"].split("-", 2)[2]]: resources[node]
            for group in ray.util.placement_group_table().values()
            if group["state"] == "CREATED"
            for node in group["bundles_to_node_id"].values()
        }
        # From the first upgrade on, room of the first plan is given back too.
        cluster.free_room(specs[0])
        states = {g["name"].split("-", 2)[2]: g["state"] for g in ray.util.placement_group_table().values()}
    assert {resource: resource in found for resource, found in placed.items()} == dict.fromkeys(
        ("antiphon_prefill", "antiphon_decode", "antiphon_router", "antiphon_prefill_b"), True
    )
    assert states == {
        "prefill-0": "REMOVED",
        "decode-0": "CREATED",
        "router-0": "CREATED",
        "prefill-1": "CREATED",
    }
    # A second router has no node: that is said after the configured time, and names what was asked for.
    more = config_for(nodes, placement_timeout_s=2.0)
    more = more.model_copy(update={"router": more.router.model_copy(update={"replicas": 2})})
    crowd = RayCluster(
        ResolvedDeployment(more, ServedModel("nothing", 1024, 0, "fp_0")), plan_processes(more)
    )
    with pytest.raises(ConfigError, match=r"no room for .*antiphon_router.* after 2 s"):
        crowd.__enter__()
