"""Which processes a deployment consists of: a pure function of its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.configs.schema import DeploymentConfig, WorkerConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to place. ``worker_id`` stays the same over its restarts; its epoch does not.

    ``cpus`` and ``gpus`` are what it reserves in its placement group; ``threads`` bounds the compute threads
    of the libraries inside it.
    """

    worker_id: str
    role: Role
    cpus: int
    gpus: int
    threads: int


def plan_processes(config: DeploymentConfig) -> tuple[ProcessSpec, ...]:
    """Every process of the deployment: prefill workers, decode workers, routers.

    Raises:
        ConfigError: the configuration asks for something that no process can be made for.
    """
    specs: list[ProcessSpec] = []
    for role, worker in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        _check_supported(role, worker)
        gpus = worker.tensor_parallel if worker.device == "cuda" else 0
        specs += (
            ProcessSpec(f"{role}-{index}", role, worker.cpu_threads, gpus, worker.cpu_threads)
            for index in range(worker.replicas)
        )
    if config.router.replicas > 1 and config.ray.address is None and config.router.port != 0:
        raise ConfigError(
            f"router.replicas: {config.router.replicas} routers on one machine cannot share port "
            f"{config.router.port}; set router.port to 0"
        )
    specs += (ProcessSpec(f"router-{index}", Role.ROUTER, 1, 0, 1) for index in range(config.router.replicas))
    return tuple(specs)


def _check_supported(role: Role, worker: WorkerConfig) -> None:
    if worker.tensor_parallel != 1:
        raise ConfigError(
            f"{role}.tensor_parallel: {worker.tensor_parallel} ranks asked for; a worker has one rank so far"
        )
    if worker.expert_parallel:
        raise ConfigError(f"{role}.expert_parallel: needs more than one rank; a worker has one rank so far")
