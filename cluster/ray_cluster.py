"""The Ray cluster of a deployment: room for its processes, and their launch.

Without an address a private cluster is started on this machine: it listens on loopback, asks every client for
a token made for this deployment, keeps its files in a folder of its own and ends with this process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from antiphon.cluster import actors
from antiphon.cluster.lifeline import gone_after_s
from antiphon.cluster.private_folder import MARK, end_private_folder, make_private_folder
from antiphon.cluster.process import StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.rank_actor import RankActor
from antiphon.cluster.ray_process import RayProcess
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import AntiphonError, ConfigError
from antiphon.protocol.identity import Role, WorkerAddress

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest is about this; tokens and KV never pass through it."""

ACTOR_CONCURRENCY = 64
"""Calls one actor serves together; all are short but the one that waits for its death."""

ACTOR_KINDS: Mapping[Role, type] = {
    Role.PREFILL: actors.PrefillActor,
    Role.DECODE: actors.DecodeActor,
    Role.ROUTER: actors.RouterActor,
}

PRIVATE_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # of 15 by default, which is for batch work beside a user's own
    # Whatever its name says: off means that every server of the cluster listens on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of a private cluster: loopback only, normal priority, no usage report, plain log lines."""

LOOPBACK_KV = {"UCX_NET_DEVICES": "lo"}
"""For workers of a private cluster: KV moves over shared memory or loopback, nothing listens elsewhere."""

SPARE_CPUS = 64
"""Of a private cluster, for workers that are added while it runs. Ray only counts them: they bind nothing."""

ALL_GPUS_OF_A_WORKER = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""For workers of several ranks: each process sees the GPUs of all of them, so that rank r computes on cuda:r.
Multicast is off: the few rows of a decode step gain nothing by it, and few containers have rights for it."""


class Interrupted(AntiphonError):
    """A signal ended the start before the deployment could take it."""


class RayCluster:
    """A connection to Ray and a placement group for each worker and router; launches their processes."""

    def __init__(
        self,
        deployment: ResolvedDeployment,
        specs: Iterable[ProcessSpec],
        *,
        actor_kinds: Mapping[Role, type] = ACTOR_KINDS,
    ) -> None:
        """``actor_kinds`` says which class hosts a role (a worker's rank 0); tests put others in place."""
        self._config = deployment.config
        self._served_model = deployment.served
        self._actor_kinds = actor_kinds
        self._specs = tuple(specs)
        self._cluster_token = secrets.token_hex(32)
        self._router_ports: dict[str, int] = {}
        self._folder: Path | None = None
        self._saved_environment: dict[str, str | None] = {}
        self._name = f"antiphon-{secrets.token_hex(4)}"
        self._groups: dict[str, Any] = {}
        self._worker_configs = {self._config.ray.revision: self._config}

    def __enter__(self) -> RayCluster:
        """Start or join the cluster and reserve room for every process.

        Raises:
            ConfigError: the address does not answer, or the cluster has no room.
        """
        try:
            self._connect()
            self._reserve()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> Path | None:
        """Where a private cluster keeps its files until it ends."""
        return self._folder

    @property
    def cluster_token(self) -> str:
        """The secret of this deployment's links."""
        return self._cluster_token

    def adopt(self, config: DeploymentConfig) -> None:
        """From now on workers of this configuration's revision run with it; those of others keep their own.

        Room of the first plan is from here on given back like any other when its process retires.
        """
        self._worker_configs[config.ray.revision] = config
        self._specs = ()

    def launch(self, spec: ProcessSpec) -> RayProcess:
        """See Launcher."""
        import ray

        kind = self._actor_kinds[spec.role]
        config_json = self._config_of(spec).model_dump_json()
        arguments: list[object] = [spec.worker_id, config_json, self._cluster_token]
        if spec.role is Role.ROUTER:
            arguments.append(self._served_model)
        first = ray.remote(kind).options(**self._options(spec, 0)).remote(*arguments)
        transport_factory = getattr(kind, "transport_factory", None)
        others = [
            ray.remote(RankActor)
            .options(**self._options(spec, rank))
            .remote(spec.role, rank, spec.worker_id, config_json, self._cluster_token, transport_factory)
            for rank in range(1, spec.ranks)
        ]
        gone_s = gone_after_s(self._config.transfer.lease_s)
        return RayProcess(first, others, self._remember_port, shares_gpus=spec.gpus > 0, gone_after_s=gone_s)

    def _options(self, spec: ProcessSpec, rank: int) -> dict[str, object]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "max_concurrency": ACTOR_CONCURRENCY,
            "max_restarts": 0,  # the supervisor restarts: a new life needs a new epoch and a backoff
            "runtime_env": {"env_vars": self._process_environment(spec)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[spec.worker_id], placement_group_bundle_index=rank
            ),
        }

    def _config_of(self, spec: ProcessSpec) -> DeploymentConfig:
        """A worker has that of its revision; a router given any free port keeps that port over its lives."""
        if spec.role is not Role.ROUTER:
            return self._worker_configs[spec.revision]
        port = self._router_ports.get(spec.worker_id)
        if port is None:
            return self._config
        return self._config.model_copy(
            update={"router": self._config.router.model_copy(update={"port": port})}
        )

    def _remember_port(self, address: WorkerAddress) -> None:
        if address.role is Role.ROUTER:
            self._router_ports[address.worker_id] = urlsplit(address.endpoint).port or 0

    def close(self) -> None:
        """Leave the cluster; a private one ends and its folder goes. Harmless when repeated."""
        import ray

        if ray.is_initialized():
            if self._config.ray.address is not None:
                for group in self._groups.values():
                    ray.util.remove_placement_group(group)
            ray.shutdown()
        self._groups = {}
        if self._folder is not None:
            end_private_folder(self._folder)
            self._folder = None
        for name, value in self._saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved_environment = {}

    def _process_environment(self, spec: ProcessSpec) -> dict[str, str]:
        threads = str(spec.threads)
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if spec.ranks > 1 and spec.gpus:
            variables |= ALL_GPUS_OF_A_WORKER
        if self._config.ray.address is None:
            variables |= {k: v for k, v in LOOPBACK_KV.items() if k not in os.environ}
        return variables

    def _connect(self) -> None:
        # Ray puts its own handlers in place, which exit at once; the ones we had drain first.
        saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._initialise()
        except SystemExit as error:
            raise Interrupted("stopped by a signal while Ray was starting") from error
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _initialise(self) -> None:
        address = self._config.ray.address
        if address is not None:
            import ray

            try:
                ray.init(address=address, namespace="antiphon", log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"ray.address: {address}: {' '.join(str(error).split())}") from error
            return
        self._folder = make_private_folder()
        private = {**PRIVATE_RAY, MARK: str(self._folder)}
        # Ray reads its environment when it is imported, so the token must be there before.
        self._set_environment({**private, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_token()})
        import ray

        ray.init(
            namespace="antiphon",
            num_cpus=sum(spec.cpus * spec.ranks for spec in self._specs) + SPARE_CPUS,
            num_gpus=None if any(spec.gpus for spec in self._specs) else 0,  # None: all of this machine's
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=True,
            logging_level="ERROR",
            _temp_dir=str(self._folder),
        )

    def _reserve(self) -> None:
        import ray

        for spec in self._specs:
            self._groups[spec.worker_id] = self._group_of(spec)
        ready = {group.ready(): worker_id for worker_id, group in self._groups.items()}
        timeout_s = self._config.ray.placement_timeout_s
        _, missing = ray.wait(list(ready), num_returns=len(ready), timeout=timeout_s, fetch_local=False)
        if missing:
            wanted = {ready[each]: self._groups[ready[each]].bundle_specs for each in missing}
            raise ConfigError(f"the Ray cluster has no room for {wanted} after {timeout_s:.0f} s")

    def _group_of(self, spec: ProcessSpec) -> Any:
        """Ask for room. Ranks of one worker share a host, whose links their collectives need."""
        from ray.util.placement_group import placement_group

        role_resources = self._config.ray.role_resources
        bundles = [bundle_of(spec, rank, role_resources=role_resources) for rank in range(spec.ranks)]
        return placement_group(bundles, strategy="STRICT_PACK", name=f"{self._name}-{spec.worker_id}")

    async def make_room(self, spec: ProcessSpec) -> None:
        """See Launcher."""
        import ray

        if spec.worker_id in self._groups:
            return
        group = self._group_of(spec)
        timeout_s = self._config.ray.placement_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await group.ready()
        except TimeoutError as error:
            ray.util.remove_placement_group(group)
            raise StartFailed(
                f"the Ray cluster has no room for {group.bundle_specs} after {timeout_s:.0f} s"
            ) from error
        self._groups[spec.worker_id] = group

    def free_room(self, spec: ProcessSpec) -> None:
        """See Launcher."""
        import ray

        planned = any(each.worker_id == spec.worker_id for each in self._specs)
        group = None if planned else self._groups.pop(spec.worker_id, None)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _set_environment(self, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            self._saved_environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value


def bundle_of(spec: ProcessSpec, rank: int = 0, *, role_resources: bool) -> dict[str, float]:
    """What one rank reserves in its worker's group; ``role_resources`` ties it to the nodes of its role."""
    bundle = {"CPU": float(spec.cpus)}
    if spec.gpus:
        bundle["GPU"] = float(spec.gpus)
    if role_resources and rank == 0:  # the others are on the same node anyway
        bundle[role_resource(spec)] = 1.0
    return bundle


def role_resource(spec: ProcessSpec) -> str:
    """Ray's custom resource of the nodes that a process may run on."""
    return f"antiphon_{spec.role}_{spec.revision}" if spec.revision else f"antiphon_{spec.role}"


@functools.cache
def ray_token() -> str:
    """This process's token: Ray's core reads the environment once, so a later cluster must ask for it too."""
    return secrets.token_hex(32)
