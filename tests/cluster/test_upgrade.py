"""What an upgrade reads, refuses and hands to the supervisor."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.cluster.control import UpgradeTo
from antiphon.cluster.operations import Operations
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.supervisor import OperationFailed
from antiphon.cluster.upgrade import Upgrade
from antiphon.configs.schema import DeploymentConfig


def config(revision: str, **sections: dict[str, Any]) -> DeploymentConfig:
    tree: dict[str, Any] = {
        "model": {"path": "nowhere"},
        "ray": {"address": "auto", "role_resources": True, "revision": revision},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return DeploymentConfig.model_validate(tree)


class Replacing:
    """A supervisor as far as an upgrade knows it."""

    def __init__(self) -> None:
        self.asked: list[list[ProcessSpec]] = []
        self.members = ()
        self.refuses = False

    async def replace_workers(
        self, specs: list[ProcessSpec], *, drain_timeout_s: float, ready_timeout_s: float
    ) -> int:
        if self.refuses:
            raise OperationFailed("no room")
        self.asked.append(specs)
        return 2


class Case:
    """An upgrade whose file a test writes as a configuration."""

    def __init__(self, running: DeploymentConfig) -> None:
        self.supervisor = Replacing()
        self.adopted: list[DeploymentConfig] = []
        self.file = running
        upgrade = Upgrade(self.supervisor, self.adopted.append, running, lambda: self.file)  # type: ignore[arg-type]
        self.operations = Operations(self.supervisor, 30.0, upgrade)  # type: ignore[arg-type]

    async def to(self, revision: str) -> str:
        return (await self.operations.carry_out(UpgradeTo(revision))).said


async def test_workers_are_those_of_the_file_and_routers_stay() -> None:
    case = Case(config("a"))
    case.file = config("b", prefill={"replicas": 2}, decode={"max_batch_size": 7})
    assert await case.to("b") == "2 workers were replaced by 3 of revision b"
    assert case.adopted == [case.file]
    (specs,) = case.supervisor.asked
    assert [(spec.role, spec.revision) for spec in specs] == [
        ("prefill", "b"),
        ("prefill", "b"),
        ("decode", "b"),
    ]
    with pytest.raises(OperationFailed, match="'b' runs already"):
        await case.to("b")


async def test_after_one_that_failed_the_same_revision_can_be_tried_again() -> None:
    case = Case(config("a"))
    case.file = config("b")
    case.supervisor.refuses = True
    with pytest.raises(OperationFailed, match="no room"):
        await case.to("b")
    case.supervisor.refuses = False
    assert "revision b" in await case.to("b")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (config("a"), "of revision 'a', not 'b'"),
        (config("b", model={"path": "elsewhere"}), "model: differs"),
        (config("b", transfer={"layer_groups": 3}, log={"level": "debug"}), "transfer, log: differs"),
        (config("b", ray={"placement_timeout_s": 1.0}), "ray: differs"),
        (config("b", decode={"max_replicas": 4}), "decode.max_replicas: differs"),
        (config("b", prefill={"replicas": 0}, decode={"local_prefill": "always"}), "prefill.replicas"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_belongs_to_processes_that_stay_is_refused(file: DeploymentConfig, message: str) -> None:
    case = Case(config("a"))
    case.file = file
    with pytest.raises(OperationFailed, match=message):
        await case.to("b")
    assert not case.adopted
    assert not case.supervisor.asked


async def test_a_deployment_without_a_file_says_so() -> None:
    operations = Operations(Replacing(), 30.0)  # type: ignore[arg-type]
    with pytest.raises(OperationFailed, match="not started from a file"):
        await operations.carry_out(UpgradeTo("b"))
