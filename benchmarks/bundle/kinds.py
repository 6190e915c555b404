"""What bundles there are: what each is for, and what its programs load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon.benchmarks.bundle.needs import ROOT, distributions, files_of, imported

THERE = frozenset({"torch", "triton", "numpy", "pytest", "setuptools", "pip"})
"""Distributions that the machine has; with everything that NVIDIA publishes for torch, never packed."""
THERE_MODULES = frozenset({"torch", "triton", "numpy", "pytest"})
PLUGINS = ("pytest-timeout", "pytest-asyncio")
"""The project's settings of pytest name what these add."""
INSTEAD = {"nixl": ("nixl-cu13",)}
"""NIXL asks for its libraries of two CUDA versions; the machine has one."""
LEFT_OUT = {
    "ray": (
        *("ray/dashboard/client/", "ray/jars/", "ray/rllib/", "ray/data/", "ray/serve/", "ray/train/"),
        *("ray/tune/", "ray/llm/"),
    ),
    "nixl-cu13": ("nixl_ep_cu13/",),
    "nvidia-cuda-sanitizer-api": tuple(
        f"nvidia/cu13/compute-sanitizer/{folder}/" for folder in ("docs", "include", "x86")
    ),
}
"""Distribution -> folders of its wheel that nothing here loads, and that are most of its size."""

BENCHMARKS = "antiphon.benchmarks"


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of programs that one bundle serves.

    Attributes:
        after: the kind whose programs it serves as well.
        scripts: that it brings.
        entries: modules that run whole, and test files.
        commands: modules of which only what they import at once is loaded.
        tools: distributions of other programs that they start, or whose module a test asks for by name.
    """

    name: str
    purpose: str
    after: str | None
    scripts: tuple[str, ...]
    entries: tuple[str | Path, ...]
    commands: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


def _gpu_tests() -> tuple[Path, ...]:
    return tuple(path.relative_to(ROOT) for path in sorted((ROOT / "tests/gpu").rglob("*.py")))


def _benchmarks(*names: str) -> tuple[str, ...]:
    return tuple(f"{BENCHMARKS}.{name}" for name in names)


_COMMAND = ("antiphon.cluster.cli",)

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "kernels",
            "tests of kernels and models, the sanitizer, engine steps and loads on one GPU",
            None,
            ("one_gpu.sh",),
            (
                *_benchmarks(
                    "one_gpu", "start_up", "model_choices", "load", "prefill_chunks", "bundle.figures"
                ),
                *_benchmarks("kernels_chunk_fp8", "kernels_prefill", "fp8_pages"),
                *(Path("tests/conftest.py"), *_gpu_tests()),
            ),
            tools=("nvidia-cuda-sanitizer-api", "gpt-oss", "safetensors"),
        ),
        Kind(
            "workers",
            "ranks, the hand-off and workers on two GPUs, and the sweep over layouts",
            "kernels",
            ("two_gpus.sh", "sweep.sh"),
            (
                *_benchmarks("two_gpus", "rank_steps", "rank_engine", "kv_handoff", "worker_pair"),
                *_benchmarks("sweep.command"),
                *("antiphon.cluster.cli_checkpoint", Path("tests/model/test_parallel_nccl.py")),
                Path("tests/model/conftest.py"),
            ),
            _COMMAND,
        ),
        Kind(
            "served",
            "whole deployments of two GPUs and of more, and the split against colocated engines",
            "workers",
            ("split.sh", "many_gpus.sh"),
            (*_benchmarks("served_pair", "split.command"), *_COMMAND, Path("tests/cluster/worker_rank.py")),
        ),
        Kind(
            "peer",
            "another system beside this one, from a tree of its own",
            "kernels",
            ("peer.sh",),
            _benchmarks("peers.beside", "peers.command"),
            _COMMAND,
        ),
    )
}


def served_by(name: str) -> Iterator[Kind]:
    """A kind, then those whose programs it serves as well."""
    at: str | None = name
    while at is not None:
        yield KINDS[at]
        at = KINDS[at].after


def scripts_of(name: str) -> tuple[str, ...]:
    """Every script that a bundle of this kind brings, in the order of kinds."""
    return tuple(script for kind in reversed([*served_by(name)]) for script in kind.scripts)


def modules_of(name: str) -> set[str]:
    """Top-level names of others' modules that the kind's programs load, but for what the machine has."""
    found: set[str] = set()
    for kind in served_by(name):
        found |= imported(files_of(kind.entries)) | imported(files_of(kind.commands, late=False), late=False)
    return found - THERE_MODULES


def packages_of(name: str) -> set[str]:
    """Distributions that a bundle of this kind packs.

    Raises:
        LookupError: one of them is not installed here, so what it requires is not known.
    """
    found = distributions(modules_of(name), PLUGINS, THERE, INSTEAD)
    tools = {tool for kind in served_by(name) for tool in kind.tools}
    return tools | {each for each in found if not each.startswith("nvidia-")}
