"""Which processes a deployment consists of: a pure function of its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One worker or router to place. ``worker_id`` stays the same over its restarts; its epoch does not.

    ``cpus`` and ``gpus`` are what each of its ``ranks`` processes reserves in its placement group, of a GPU
    perhaps only a share; ``threads`` bounds the compute threads of the libraries inside one of them.
    A worker's ``revision`` names the configuration that it runs with and the nodes that it runs on.
    """

    worker_id: str
    role: Role
    cpus: int
    gpus: float
    threads: int
    ranks: int = 1
    revision: str = ""


def plan_processes(config: DeploymentConfig) -> tuple[ProcessSpec, ...]:
    """Every process of the deployment: prefill workers, decode workers, routers.

    Raises:
        ConfigError: the configuration asks for something that no process can be made for.
    """
    specs: list[ProcessSpec] = []
    for role, worker in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        gpus = worker.gpu_share if worker.device == "cuda" else 0.0
        specs += (
            ProcessSpec(
                worker_id=f"{role}-{index}",
                role=role,
                cpus=worker.cpu_threads,
                gpus=gpus,
                threads=worker.cpu_threads,
                ranks=worker.tensor_parallel,
                revision=config.ray.revision,
            )
            for index in range(worker.replicas)
        )
    if config.router.replicas > 1 and config.ray.address is None and config.router.port != 0:
        raise ConfigError(
            f"router.replicas: {config.router.replicas} routers on one machine cannot share port "
            f"{config.router.port}; set router.port to 0"
        )
    specs += (ProcessSpec(f"router-{index}", Role.ROUTER, 1, 0, 1) for index in range(config.router.replicas))
    return tuple(specs)
