"""Going over to a new revision: workers as the deployment file now has them, in place of those that run.

The file may change what workers are (``prefill``, ``decode``) and must name another ``ray.revision``; with
``ray.role_resources`` the new ones then run on nodes of their own. Everything else belongs to processes that
stay: its change is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.supervisor import OperationFailed, Supervisor
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role

log = structlog.get_logger("antiphon.upgrade")

WORKER_SECTIONS = ("prefill", "decode")


class Upgrade:
    """Replaces all workers of one supervisor; knows which configuration they run with."""

    def __init__(
        self,
        supervisor: Supervisor,
        adopt: Callable[[DeploymentConfig], None],
        config: DeploymentConfig,
        reread: Callable[[], DeploymentConfig],
    ) -> None:
        """``adopt`` tells the launcher of a revision's configuration; ``reread`` resolves the file anew."""
        self._supervisor = supervisor
        self._adopt = adopt
        self._config = config
        self._reread = reread
        self._one_at_a_time = asyncio.Lock()

    async def to(self, revision: str) -> str:
        """Replace the workers; returns what was done once the old ones have ended.

        Raises:
            OperationFailed: the file is not of this revision or changes what cannot change; or see
                ``Supervisor.replace_workers``. The workers that ran go on.
            AntiphonError: the file, or its model, cannot be used.
        """
        async with self._one_at_a_time:
            return await self._to(revision)

    async def _to(self, revision: str) -> str:
        wanted = await asyncio.to_thread(self._reread)
        check_upgrade(self._config, wanted, revision)
        specs = [spec for spec in plan_processes(wanted) if spec.role is not Role.ROUTER]
        log.info("upgrading", revision=revision, instead_of=self._config.ray.revision, workers=len(specs))
        self._adopt(wanted)
        replaced = await self._supervisor.replace_workers(
            specs,
            drain_timeout_s=wanted.router.drain_timeout_s,
            ready_timeout_s=wanted.ray.placement_timeout_s,
        )
        self._config = wanted
        return f"{replaced} workers were replaced by {len(specs)} of revision {revision}"


def check_upgrade(running: DeploymentConfig, wanted: DeploymentConfig, revision: str) -> None:
    """Refuse what an upgrade cannot do.

    Raises:
        OperationFailed: says which key, and what would do instead.
    """
    if wanted.ray.revision != revision:
        raise OperationFailed(
            f"the deployment file is of revision {wanted.ray.revision!r}, not {revision!r}; a changed "
            "ConfigMap reaches its pods after up to two minutes"
        )
    if revision == running.ray.revision:
        raise OperationFailed(f"ray.revision: {revision!r} runs already")
    changed = _changed(running, wanted, without=WORKER_SECTIONS)
    if "ray" in changed and not _changed(running.ray, wanted.ray, without=("revision",)):
        changed.remove("ray")
    for section in WORKER_SECTIONS:
        before, after = getattr(running, section), getattr(wanted, section)
        if before.max_replicas != after.max_replicas:
            changed.append(f"{section}.max_replicas")
        if (before.replicas == 0) != (after.replicas == 0):
            changed.append(f"{section}.replicas (to or from 0)")
    if changed:
        raise OperationFailed(
            f"{', '.join(changed)}: differs, and belongs to processes that an upgrade keeps; start a second "
            "deployment, or restart this one"
        )


def _changed(before: object, after: object, *, without: Collection[str]) -> list[str]:
    mine, theirs = vars(before), vars(after)
    return [name for name in mine if name not in without and mine[name] != theirs[name]]
