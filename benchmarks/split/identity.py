"""What decides a run's figures besides its load's rate: a comparison goes on only with runs that share it.

A server of somebody else that runs already says nothing of itself: its name stands for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.configs.schema import DeploymentConfig

SERVING = (
    *("protocol", "configs", "telemetry", "kernels", "model", "engine", "kv_transfer"),
    *("prefill_worker", "decode_worker", "router", "cluster"),
)
"""Folders whose code serves."""
GENERATOR = ("benchmarks/serve",)
SOURCES = (".py", ".cu", ".cuh", ".h")
LIBRARIES = ("torch", "nixl")
COMMON = frozenset(
    {"input_tokens", "output_tokens", "duration_s", "warmup_s", "drain_s", "seed", "generator", "code"}
    | {*LIBRARIES}
)
"""What all runs of a comparison share, whatever served them; a peer has no code of ours."""
_PACKAGE = Path(__file__).resolve().parents[2]
_PLACES = frozenset({"path", "directory", "api_key_file", "tls_certificate_file", "tls_key_file"})
"""Keys that say where something is on this machine."""
_ADDRESSES = frozenset({"router.host", "router.port", "metrics.host", "ray.address"})


def serving_settings(arrangement: Arrangement) -> dict[str, object]:
    """Name -> value, as JSON holds it, of all that is known to decide what an arrangement does."""
    found: dict[str, object] = {"generator": fingerprint(GENERATOR)}
    if arrangement.config is not None:
        found |= {"code": fingerprint(SERVING)} | library_versions() | configured(arrangement.config)
    elif arrangement.replicas is not None:
        replicas = arrangement.replicas
        found |= {
            "system": replicas.system.label,
            "replicas": replicas.count,
            "places": replicas.places,
            "longest_tokens": replicas.longest_tokens,
            "on_gpus": replicas.on_gpus,
        }
    return found


def configured(config: DeploymentConfig) -> dict[str, object]:
    """Every key of a deployment but addresses and places of this machine."""
    found: dict[str, object] = {}

    def take(section: Mapping[str, object], prefix: str) -> None:
        for key, value in section.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                take(value, f"{name}.")
            elif key not in _PLACES and name not in _ADDRESSES:
                found[name] = value

    take(config.model_dump(mode="json"), "")
    return found


@cache
def fingerprint(folders: tuple[str, ...]) -> str:
    """Of the source files in these folders of the package, by name and content."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((_PACKAGE / folder).rglob("*")):
            if path.suffix in SOURCES:
                digest.update(f"{path.relative_to(_PACKAGE)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def library_versions() -> dict[str, object]:
    """Of those that compute and move KV, as far as they are installed."""
    found: dict[str, object] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def differences(known: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """One line for each setting that differs, with both values; "none" where only one side has it."""
    return [
        f"{name} {known.get(name, 'none')!s} there, {wanted.get(name, 'none')!s} now"
        for name in sorted(known.keys() | wanted.keys())
        if known.get(name) != wanted.get(name)
    ]
