"""From what the operator wrote to what is run: model located, limits known, everything checked once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from antiphon.cluster.layout_check import check_layouts
from antiphon.configs.schema import DeploymentConfig
from antiphon.demo.cached_checkpoint import ensure_demo_checkpoint
from antiphon.demo.shape import MODEL_NAME
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.hub import fetch
from antiphon.protocol.errors import CheckpointError, ConfigError
from antiphon.router.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ResolvedDeployment:
    """A configuration whose model is an absolute folder, and what the API says about that model."""

    config: DeploymentConfig
    served: ServedModel


def resolve_deployment(config: DeploymentConfig) -> ResolvedDeployment:
    """Locate the model, downloading it if it is a hub id, and check its files' headers.

    Raises:
        CheckpointError: no such model, or its files cannot be loaded; nothing has been started yet.
        ConfigError: a layout that the model cannot be spread over, or a cache too small for its window.
    """
    # Named before the path becomes a folder of the hub's cache, whose last part is a commit.
    name = config.model.name
    folder = locate(config.model.path, config.model.revision).resolve()
    index = open_checkpoint(folder)
    check_layouts(config, index.config)
    context = max_context_tokens(config, index.config.max_context_tokens)
    model = config.model.model_copy(
        update={"path": str(folder), "served_name": name, "max_context_tokens": context}
    )
    served = ServedModel(
        name=name,
        max_context_tokens=context,
        created=int((folder / "config.json").stat().st_mtime),
        fingerprint=_fingerprint(index, config.model.revision),
    )
    return ResolvedDeployment(config.model_copy(update={"model": model}), served)


def locate(path: str, revision: str | None) -> Path:
    """The model's folder: as given, the model that ships with the project, or fetched from the hub.

    Raises:
        CheckpointError: no such model, or it cannot be put where models are kept.
    """
    if path == MODEL_NAME and not Path(path).exists():
        if revision is not None:
            raise CheckpointError(
                f"{path}: ships with the project; a revision ({revision}) is of hub ids only"
            )
        return ensure_demo_checkpoint()
    return fetch(path, revision)


def max_context_tokens(config: DeploymentConfig, checkpoint_limit: int) -> int:
    """Longest prompt and output together: the checkpoint's limit, the operator's, and what the caches hold.

    Raises:
        ConfigError: the operator asks for more than the checkpoint or a cache can give.
    """
    limits = {"the checkpoint": checkpoint_limit}
    pools = (("prefill", config.prefill), ("decode", config.decode))
    for role, worker in pools if config.prefill.replicas else pools[1:]:
        cache = worker.kv_cache
        limits[f"{role}.kv_cache.full_pages"] = cache.full_pages * cache.page_size_tokens
    asked = config.model.max_context_tokens
    for what, limit in limits.items():
        if asked is not None and asked > limit:
            raise ConfigError(f"model.max_context_tokens: {asked} asked for, {what} gives {limit}")
    return asked or min(limits.values())


def _fingerprint(index: CheckpointIndex, revision: str | None) -> str:
    """Changes with the shape, the revision, or the name, size or place of any tensor."""
    digest = hashlib.sha256(repr((index.config, index.layout, revision)).encode())
    for name in sorted(index.tensors):
        tensor = index.tensors[name]
        digest.update(repr((name, tensor.dtype, tensor.shape, Path(tensor.file).name)).encode())
    for file in sorted({tensor.file for tensor in index.tensors.values()}):
        digest.update(repr((file.name, file.stat().st_size)).encode())
    return f"fp_{digest.hexdigest()[:16]}"
