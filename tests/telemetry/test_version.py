"""A version is one, and known to a checkout that was never installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import antiphon

ROOT = Path(__file__).resolve().parents[2]
UNINSTALLED = """
import importlib.metadata

def find_none(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = importlib.metadata.distribution = find_none
from antiphon.telemetry.registry import ProcessRegistry

registry = ProcessRegistry({})
registry.declare_build("prefill")
print(registry.exposition()[0].decode())
"""


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert antiphon.__version__ == project["version"]


def test_a_checkout_that_is_not_installed_tells_its_version() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", UNINSTALLED], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    assert f'antiphon_build_info{{role="prefill",version="{antiphon.__version__}"}}' in run.stdout
