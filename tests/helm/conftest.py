"""Renders the chart with Helm's own engine."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).with_name("rendering")))

from rendered_chart import (
    CHART,
    EXAMPLES,
    Document,
    Release,
    Renderer,
    dotted,
    example,
    merged,
)


class OneValuePerKey(yaml.CSafeLoader):
    """A loader that refuses a key that is there twice, of which Kubernetes would drop one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {sorted(keys)}"
        return super().construct_mapping(node, deep=deep)


@pytest.fixture(scope="session")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as chart:
        yield chart


@pytest.fixture(scope="session")
def render(chart: helm_python.Chart) -> Renderer:
    """Render values (a map, or the name of an example, with dotted changes) into a Release."""

    def rendered(values: Document | str, changes: Document | None = None, name: str = "demo") -> Release:
        tree = example(values) if isinstance(values, str) else values
        for path, value in (changes or {}).items():
            tree = merged(tree, dotted(path, value))
        manifests = chart.render(tree, name=name, namespace="prod")
        notes = manifests.pop("antiphon/templates/NOTES.txt")
        loaded = (yaml.load_all(text, Loader=OneValuePerKey) for text in manifests.values())
        return Release(tuple(d for found in loaded for d in found if d is not None), notes)

    return rendered


@pytest.fixture(scope="session", params=EXAMPLES)
def release(request: pytest.FixtureRequest, render: Renderer) -> Release:
    """Each example that comes with the chart."""
    return render(request.param)
