"""What a rendering of the chart gave, and the values to render it with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm/antiphon"
EXAMPLES = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Release:
    """What one rendering gave."""

    documents: tuple[Document, ...]
    notes: str

    def of_kind(self, kind: str) -> list[Document]:
        """All documents of a kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, ending: str = "") -> Document:
        """The only document of a kind whose name ends so."""
        (found,) = (d for d in self.of_kind(kind) if d["metadata"]["name"].endswith(ending))
        return found

    def groups(self) -> dict[str, Document]:
        """Group name -> head or worker group of the RayCluster."""
        spec = self.one("RayCluster")["spec"]
        return {"head": spec["headGroupSpec"]} | {g["groupName"]: g for g in spec["workerGroupSpecs"]}

    def pods(self) -> dict[str, Document]:
        """Component -> pod (metadata and spec), the one of `helm test` included."""
        pods: dict[str, Document] = {}
        for name, group in self.groups().items():
            pods[name] = group["template"]
        for pod in self.of_kind("Pod"):
            pods[pod["metadata"]["labels"]["app.kubernetes.io/component"]] = pod
        return pods

    def deployment_file(self) -> str:
        """The file that the supervisor reads."""
        return str(self.one("ConfigMap", "-deployment")["data"]["deployment.yaml"])


Renderer = Callable[..., Release]


def merged(base: Document, change: Document) -> Document:
    """``change`` over ``base``, map by map."""
    result = copy.deepcopy(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result


def example(name: str) -> Document:
    """Values of an example that comes with the chart."""
    values: Document = yaml.safe_load((CHART / "ci" / name).read_text())
    return values


def dotted(path: str, value: object) -> Document:
    """``a.b.c`` and a value as nested maps."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def crd_schema(kind: str) -> Document:
    """What of a custom resource this project relies on, as a strict schema."""
    schema: Document = json.loads((ROOT / "tests/helm/crds" / f"{kind.lower()}.json").read_text())
    return schema
