"""Who may import whom: walked in the source, and held at run time where it matters most."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS: dict[str, frozenset[str]] = {
    "protocol": frozenset(),
    "kernels": frozenset(),
    "configs": frozenset({"protocol"}),
    "telemetry": frozenset({"protocol"}),
    "kv_transfer": frozenset({"protocol", "telemetry"}),
    "model": frozenset({"kernels", "protocol"}),
    "engine": frozenset({"model", "kernels", "protocol", "configs", "telemetry"}),
    "prefill_worker": frozenset({"engine", "kv_transfer", "protocol", "configs", "telemetry"}),
    "decode_worker": frozenset({"engine", "kv_transfer", "protocol", "configs", "telemetry"}),
    "router": frozenset({"protocol", "configs", "telemetry"}),
    "demo": frozenset({"protocol", "configs", "kernels", "model"}),
}
"""Folder -> the folders it may import besides itself. ``protocol`` carries the error classes."""

TOP = frozenset({"cluster", "benchmarks"})
"""May import everything; nothing below may import them."""

EXTERNAL_OWNERS: dict[str, frozenset[str]] = {
    "ray": TOP,
    "torch": frozenset(LAYERS) - {"protocol", "configs", "router", "telemetry"} | TOP,
    "typer": TOP,
    "fastapi": frozenset({"router"}) | TOP,
    "openai_harmony": frozenset({"router", "demo"}) | TOP,
    "opentelemetry": frozenset({"telemetry"}),
}
"""A library -> the folders that may know it."""


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file, lazy ones inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "antiphon":
                for alias in node.names:
                    if alias.name != "__version__":
                        yield node.lineno, f"antiphon.{alias.name}"
            elif node.module:
                yield node.lineno, node.module


def violations(folder: str, name: str, source: str) -> list[str]:
    """What in one file of ``folder`` breaks the table, one line each."""
    found = []
    allowed = frozenset(LAYERS) | TOP if folder in TOP else LAYERS[folder] | {folder}
    for line, module in imports_of(source):
        first, *rest = module.split(".")
        if not first:
            found.append(f"{name}:{line}: relative import {module}")
        elif first == "antiphon" and rest and rest[0] not in allowed:
            found.append(f"{name}:{line}: {folder} may not import {module}")
        elif first in EXTERNAL_OWNERS and folder not in EXTERNAL_OWNERS[first]:
            found.append(f"{name}:{line}: {folder} may not import {first}")
        elif first == "nixl" and name != "kv_transfer/nixl_transport.py" and folder != "benchmarks":
            found.append(f"{name}:{line}: NIXL is imported in kv_transfer/nixl_transport.py only")
    return found


def code_folders() -> list[str]:
    folders = (path for path in (ROOT / "src/antiphon").iterdir() if path.is_dir())
    return sorted(path.name for path in folders if path.name != "__pycache__")


def test_every_code_folder_has_its_place_in_the_table() -> None:
    assert set(code_folders()) == set(LAYERS) | TOP
    for folder in code_folders():
        link = ROOT / "src/antiphon" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
        assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize("folder", sorted(set(LAYERS) | TOP))
def test_folder_imports_only_what_lies_below_it(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [v for path in files for v in violations(folder, str(path.relative_to(ROOT)), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("engine", "import ray"),
        ("engine", "from antiphon.kv_transfer.plan import merge"),
        ("router", "def late():\n    import torch"),
        ("router", "from antiphon import engine"),
        ("protocol", "import antiphon.configs.schema"),
        ("prefill_worker", "from antiphon.decode_worker.worker import DecodeWorker"),
        ("kv_transfer", "from nixl._api import nixl_agent"),
        ("model", "from .config import GptOssConfig"),
    ],
)
def test_the_walk_sees_a_breach(folder: str, source: str) -> None:
    assert violations(folder, f"{folder}/breach.py", source)


def test_lower_layers_cannot_form_a_cycle() -> None:
    placed: set[str] = set()
    waiting = dict(LAYERS)
    while waiting:
        ready = {folder for folder, needs in waiting.items() if needs <= placed}
        assert ready, f"these folders import one another: {sorted(waiting)}"
        placed |= ready
        waiting = {folder: needs for folder, needs in waiting.items() if folder not in ready}


PROBE = """
import json, resource, sys
import {module}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"modules": sorted(sys.modules), "cpu_s": used.ru_utime + used.ru_stime}}))
"""


def import_in_new_process(module: str) -> tuple[set[str], float]:
    """(modules loaded by importing ``module`` in a bare interpreter, CPU seconds it took)."""
    command = [sys.executable, "-c", PROBE.format(module=module)]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name.partition(".")[0] for name in seen["modules"]}, float(seen["cpu_s"])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("antiphon.protocol.messages", {"torch", "ray", "nixl", "fastapi", "pydantic", "zmq"}),
        ("antiphon.configs.schema", {"torch", "ray", "nixl", "fastapi"}),
        ("antiphon.router.server", {"torch", "ray", "nixl", "transformers", "triton"}),
        ("antiphon.cluster.cli", {"torch", "ray", "nixl", "transformers", "fastapi", "openai_harmony"}),
        ("antiphon.cluster.actors", {"torch", "nixl", "transformers", "fastapi"}),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    loaded, _ = import_in_new_process(module)
    assert not loaded & absent


@pytest.mark.parametrize("module", ["antiphon.router.server", "antiphon.cluster.cli"])
def test_import_is_quick(module: str) -> None:
    # CPU time, not wall time, and the best of three: a loaded machine must not fail the test.
    assert min(import_in_new_process(module)[1] for _ in range(3)) < 1.5
