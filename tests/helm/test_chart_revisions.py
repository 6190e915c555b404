"""The steps of an upgrade by groups named after the revision, as `helm upgrade` would take them."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from command_line import parse_with_the_cli
from document_schemas import validate
from rendered_chart import CHART, ROOT, Document, Release, Renderer, crd_schema, example, merged

from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.ray_cluster import role_resource
from antiphon.cluster.upgrade import check_upgrade
from antiphon.configs.schema import DeploymentConfig

STEPS = ("1-beside", "2-retired")
BEFORE = "cpu-demo-values.yaml"


def step(render: Renderer, name: str) -> Release:
    overlay: Document = yaml.safe_load((CHART / f"ci/upgrade/{name}.yaml").read_text())
    return render(merged(example(BEFORE), overlay))


def config_of(release: Release) -> DeploymentConfig:
    return DeploymentConfig.model_validate(yaml.safe_load(release.deployment_file()))


def images(group: Document) -> set[str]:
    spec = group["template"]["spec"]
    return {c["image"] for c in [*spec.get("initContainers", []), *spec["containers"]]}


def offered(group: Document) -> Document:
    resources: Document = json.loads(json.loads(group["rayStartParams"]["resources"]))
    return resources


@pytest.mark.parametrize("name", STEPS)
def test_every_document_of_a_step_is_valid(name: str, render: Renderer) -> None:
    release = step(render, name)
    for document in release.documents:
        validate(document)
    names = [(d["kind"], d["metadata"]["name"]) for d in release.documents]
    assert len(names) == len(set(names))


def test_new_pods_come_beside_the_old_ones_which_stay_as_they_are(render: Renderer) -> None:
    before, beside = render(BEFORE), step(render, "1-beside")
    assert set(beside.groups()) == {*before.groups(), "prefill-b", "decode-b"}
    assert beside.one("RayCluster")["spec"]["upgradeStrategy"] == {"type": "None"}
    for name in ("prefill", "decode"):
        old, new = beside.groups()[name], beside.groups()[f"{name}-b"]
        assert old["replicas"] == before.groups()[name]["replicas"]
        assert old["rayStartParams"] == before.groups()[name]["rayStartParams"]
        assert (offered(old), offered(new)) == ({f"antiphon_{name}": 1}, {f"antiphon_{name}_b": 1})
        assert images(old) == images(before.groups()[name])
        assert images(new) == {"antiphon-worker:0.2.0"}
    assert beside.groups()["prefill-b"]["replicas"] == 2


def test_the_new_groups_have_room_for_exactly_the_plan_of_the_new_file(render: Renderer) -> None:
    beside = step(render, "1-beside")
    wanted: dict[str, int] = {}
    for spec in plan_processes(config_of(beside)):
        wanted[role_resource(spec)] = wanted.get(role_resource(spec), 0) + 1
    room: dict[str, int] = {}
    for name, group in beside.groups().items():
        if name == "router" or name.endswith("-b"):
            for resource, count in offered(group).items():
                room[resource] = room.get(resource, 0) + count * group["replicas"]
    assert room == wanted


def test_the_supervisor_takes_the_step_from_the_old_file_to_the_new_one(render: Renderer) -> None:
    check_upgrade(config_of(render(BEFORE)), config_of(step(render, "1-beside")), "b")
    assert step(render, "1-beside").deployment_file() == step(render, "2-retired").deployment_file()


def test_a_retired_group_stays_without_pods_and_without_a_budget(render: Renderer) -> None:
    retired = step(render, "2-retired")
    for name in ("prefill", "decode"):
        group = retired.groups()[name]
        assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [0, 0, 0]
    budgets = {
        d["metadata"]["name"].removeprefix("demo-antiphon-") for d in retired.of_kind("PodDisruptionBudget")
    }
    assert budgets == {"prefill-b", "decode-b", "router"}


def test_a_budget_counts_the_pods_of_its_revision_alone(render: Renderer) -> None:
    release = render(BEFORE, {"revision": "b", "ray.upgradeStrategy": "None", "previousRevisions": [
        {"name": "a", "tag": "0.1.0"}
    ]})  # fmt: skip
    pods = release.pods()
    for budget in release.of_kind("PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        chosen = [name for name, pod in pods.items() if labels.items() <= pod["metadata"]["labels"].items()]
        assert [f"demo-antiphon-{name}" for name in chosen] == [budget["metadata"]["name"]]


def test_pods_that_both_roles_share_have_groups_of_revisions_too(render: Renderer) -> None:
    release = render("two-gpus-values.yaml", {
        "revision": "b",
        "ray.upgradeStrategy": "None",
        "previousRevisions": [{"name": "a", "tag": "0.1.0"}],
    })  # fmt: skip
    assert set(release.groups()) == {"head", "router", "workers-a", "workers-b"}
    assert offered(release.groups()["workers-b"]) == {"antiphon_prefill_b": 1, "antiphon_decode_b": 1}
    for document in release.documents:
        validate(document)


def test_the_schema_of_the_custom_resource_allows_a_group_without_pods() -> None:
    groups = crd_schema("RayCluster")["properties"]["spec"]["properties"]["workerGroupSpecs"]
    assert groups["items"]["properties"]["maxReplicas"].get("minimum", 0) == 0


@pytest.mark.parametrize("where", ["notes", "page"])
def test_the_commands_that_are_told_are_commands(where: str, render: Renderer) -> None:
    notes = step(render, "1-beside").notes
    text = notes if where == "notes" else (ROOT / "docs/operations/upgrade.md").read_text()
    commands = re.findall(r"\bantiphon (?:upgrade|status|scale) [^\n|`;]*|\bantiphon status", text)
    assert any(command.startswith("antiphon upgrade ") for command in commands)
    for command in commands:
        parse_with_the_cli(shlex.split(command)[1:])


def test_the_notes_tell_the_next_step_only_while_there_is_one(render: Renderer) -> None:
    assert "antiphon upgrade b" in step(render, "1-beside").notes
    assert "antiphon upgrade" not in step(render, "2-retired").notes
    assert "antiphon upgrade" not in render(BEFORE).notes
