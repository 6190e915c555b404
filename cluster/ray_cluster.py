"""Processes as Ray actors: the only file that talks to Ray.

Without an address a private cluster is started on this machine: it listens on loopback, asks every client for
a token made for this deployment, keeps its files in a folder of its own and ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from antiphon.cluster import actors
from antiphon.cluster.process import ProcessDied, ProcessStatus, StartFailed
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.protocol.errors import AntiphonError, ConfigError
from antiphon.protocol.identity import Role, Topology, WorkerAddress

log = structlog.get_logger("antiphon.ray")

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest is about this; tokens and KV never pass through it."""

ACTOR_CONCURRENCY = 64
"""Calls one actor serves together; all are short but the one that waits for its death."""

PLACEMENT_TIMEOUT_S = 60.0

ACTOR_KINDS: Mapping[Role, type] = {
    Role.PREFILL: actors.PrefillActor,
    Role.DECODE: actors.DecodeActor,
    Role.ROUTER: actors.RouterActor,
}

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of a private cluster: no usage report, no metrics agent's work, plain log lines."""


class RayProcess:
    """One life of one process, as a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        # Pending for as long as the actor lives: Ray fails it the moment the process is gone.
        self._death = asyncio.ensure_future(self._await_death())

    async def start(self, topology: Topology) -> WorkerAddress:
        """See ProcessHandle."""
        address: WorkerAddress = await self._call("start", topology)
        return address

    async def set_topology(self, topology: Topology) -> None:
        """See ProcessHandle."""
        await self._call("set_topology", topology)

    async def status(self) -> ProcessStatus:
        """See ProcessHandle."""
        status: ProcessStatus = await self._call("status")
        return status

    async def drain(self, timeout_s: float) -> bool:
        """See ProcessHandle."""
        drained: bool = await self._call("drain", timeout_s)
        return drained

    async def stop(self) -> None:
        """See ProcessHandle."""
        await self._call("stop")

    async def wait_dead(self) -> str:
        """See ProcessHandle."""
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        """See ProcessHandle."""
        import ray

        ray.kill(self._actor, no_restart=True)

    async def _await_death(self) -> str:
        from ray.exceptions import RayActorError

        try:
            await self._actor.wait_for_ever.remote()
        except RayActorError as error:
            return " ".join(str(error).split())[:300]
        return "its actor returned from a call that never returns"

    async def _call(self, method: str, *arguments: object) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            raise ProcessDied(" ".join(str(error).split())[:300]) from error
        except RayTaskError as error:
            # What the code in the process raised. An error made for users is final; others are defects.
            if isinstance(error.cause, AntiphonError):
                raise StartFailed(str(error.cause)) from error
            raise ProcessDied(f"{method} failed: {error}") from error


class RayCluster:
    """A connection to Ray and the placement group of one deployment. Launches the deployment's processes."""

    def __init__(
        self,
        deployment: ResolvedDeployment,
        specs: Iterable[ProcessSpec],
        *,
        actor_kinds: Mapping[Role, type] = ACTOR_KINDS,
    ) -> None:
        """``actor_kinds`` says which class hosts a role; tests put faulty ones in place."""
        self._config = deployment.config
        self._served_model = deployment.served
        self._actor_kinds = actor_kinds
        self._specs = tuple(specs)
        self._cluster_token = secrets.token_hex(32)
        self._folder: Path | None = None
        self._saved_environment: dict[str, str | None] = {}
        self._group: Any = None

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

    def launch(self, spec: ProcessSpec) -> RayProcess:
        """See Launcher."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {
            "num_cpus": spec.cpus,
            "num_gpus": spec.gpus,
            "max_concurrency": ACTOR_CONCURRENCY,
            "max_restarts": 0,  # the supervisor restarts: a new life needs a new epoch and a backoff
            "runtime_env": {"env_vars": _thread_limits(spec.threads)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._specs.index(spec)
            ),
        }
        arguments: list[object] = [spec.worker_id, self._config.model_dump_json(), self._cluster_token]
        if spec.role is Role.ROUTER:
            arguments.append(self._served_model)
        actor = ray.remote(self._actor_kinds[spec.role]).options(**options).remote(*arguments)
        return RayProcess(actor)

    def close(self) -> None:
        """Leave the cluster; a private one ends and its folder goes. Harmless when repeated."""
        import ray

        if ray.is_initialized():
            if self._group is not None and self._config.ray.address is not None:
                ray.util.remove_placement_group(self._group)
            ray.shutdown()
        self._group = None
        if self._folder is not None:
            _kill_processes_naming(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for name, value in self._saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved_environment = {}

    def _connect(self) -> None:
        # Ray puts its own handlers in place, which exit at once; the ones we had drain first.
        saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._initialise()
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
        # Ray reads its environment when it is imported, so the token must be there before.
        self._set_environment({**QUIET_RAY, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _ray_token()})
        import ray

        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-"))
        ray.init(
            namespace="antiphon",
            num_cpus=sum(spec.cpus for spec in self._specs),
            num_gpus=sum(spec.gpus for spec in self._specs),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=True,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._folder),
        )

    def _reserve(self) -> None:
        import ray
        from ray.util.placement_group import placement_group

        bundles = [{"CPU": float(s.cpus)} | ({"GPU": float(s.gpus)} if s.gpus else {}) for s in self._specs]
        self._group = placement_group(bundles, strategy="PACK", name=f"antiphon-{secrets.token_hex(4)}")
        try:
            ray.get(self._group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ConfigError(
                f"the Ray cluster has no room for {bundles} after {PLACEMENT_TIMEOUT_S:.0f} s"
            ) from error

    def _set_environment(self, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            self._saved_environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value


def _thread_limits(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@functools.cache
def _ray_token() -> str:
    """This process's token: Ray's core reads the environment once, so a later cluster must ask for it too."""
    return secrets.token_hex(32)


def _kill_processes_naming(folder: Path) -> None:
    """End what a start that failed half-way left running: Ray's own processes carry the folder's name."""
    needle = os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if needle in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
