"""Test-wide settings that must be in place before any package is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

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

SERVICES = {"chaos", "clients", "cluster", "e2e", "kv_transfer", "protocol", "telemetry", "workers"}
SERVICES |= {"test_chart_end_to_end.py"}
SERVICES |= {"test_playground.py", "test_redis_response_store.py", "test_slow_requests.py"}
"""Folders and files whose tests run services or watch a clock of the machine.

Most tests of the router do neither: their loop's time is their own process's."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests out to processes by file, but all of SERVICES to one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if SERVICES.isdisjoint(file.split("/")) else "services"

    return ByFile(config, log)
