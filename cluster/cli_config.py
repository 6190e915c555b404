"""``antiphon config check``: what a deployment file asks for, and whether it can be had."""

from __future__ import annotations

from pathlib import Path

from antiphon.cluster.layout_check import GIB, check_memory, gpus_of, rank_needs, table
from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.resolution import max_context_tokens
from antiphon.configs.deployment_file import load_deployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.demo.shape import MODEL_NAME, TINY
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.config import PRESETS, GptOssConfig
from antiphon.protocol.errors import ConfigError


def check_file(file: Path, gpu_memory_gib: float, node_gpus: int) -> None:
    """Check a deployment file without starting, downloading or loading anything; prints what it takes.

    Args:
        gpu_memory_gib: of one GPU.
        node_gpus: GPUs of one machine, which the ranks of one worker share.

    Raises:
        AntiphonError: it cannot be used; names the key and the values.
    """
    config = load_deployment(file)
    processes = plan_processes(config)
    model, source = _shape_of(config)
    max_context_tokens(config, model.max_context_tokens)
    needs = rank_needs(config, model)
    for spec in processes:
        if spec.gpus and spec.ranks > node_gpus:
            raise ConfigError(
                f"{spec.role}.tensor_parallel: {spec.ranks} ranks asked for, a machine has {node_gpus} GPUs"
            )
    memory = int(gpu_memory_gib * GIB)
    print(f"{config.model.name} ({source}), GiB of one rank:")
    print(table(needs, memory))
    check_memory(needs, memory)
    gpus = gpus_of(needs)
    takes = f", {gpus} GPUs of {gpu_memory_gib:g} GiB" if gpus else ""
    names = ", ".join(f"{p.worker_id}{f' ({p.ranks} ranks)' if p.ranks > 1 else ''}" for p in processes)
    print(f"{file}: ok, {sum(p.ranks for p in processes)} processes{takes}: {names}")


def _shape_of(config: DeploymentConfig) -> tuple[GptOssConfig, str]:
    """The model's shape: of the folder, or of a published size that is not here yet."""
    folder = Path(config.model.path).expanduser()
    if folder.is_dir():
        return open_checkpoint(folder).config, str(folder)
    if config.model.path == MODEL_NAME:
        return TINY, "ships with the project"
    known = PRESETS.get(folder.name)
    if known is None:
        raise ConfigError(
            f"model.path: {config.model.path}: no such folder, and not a published size "
            f"({', '.join(PRESETS)}): its layout cannot be checked"
        )
    return known, "published size"
