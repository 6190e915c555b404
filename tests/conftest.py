"""Test-wide settings that must be in place before any package is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        # Must be set before triton is imported anywhere: kernels then run in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's matter.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

SERVICES = {"chaos", "clients", "cluster", "e2e", "engine"}
SERVICES |= {"kv_transfer", "protocol", "router", "telemetry", "workers"}
"""Folders whose tests run services or watch the clock. One process has them, and all that deploys."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep together what pytest-xdist may not deal out: the tests of a file, and all of SERVICES."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        inside = item.path.relative_to(Path(__file__).parent)
        starts = inside.parts[0] in SERVICES or item.get_closest_marker("e2e") is not None
        together = "services" if starts else str(inside)
        item.add_marker(pytest.mark.xdist_group(together))
