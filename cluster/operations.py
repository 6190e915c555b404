"""What a running deployment does when asked: resize a pool, restart or replace processes, say how it is."""

from __future__ import annotations

from antiphon.cluster.control import Answer, AskStatus, MemberReport, Request, RollAll, ScalePool, UpgradeTo
from antiphon.cluster.supervisor import OperationFailed, Supervisor
from antiphon.cluster.upgrade import Upgrade
from antiphon.protocol.identity import Role

SCALABLE = (Role.PREFILL, Role.DECODE)


class Operations:
    """Carries out requests on one supervisor, one at a time."""

    def __init__(
        self, supervisor: Supervisor, drain_timeout_s: float, upgrade: Upgrade | None = None
    ) -> None:
        """``drain_timeout_s``: what a process gets to finish what it holds before it is ended.

        Without ``upgrade`` the deployment has no file from which a new revision could be read.
        """
        self._upgrade = upgrade
        self._supervisor = supervisor
        self._drain_timeout_s = drain_timeout_s

    async def carry_out(self, request: Request) -> Answer:
        """Do what is asked; returns when it is done.

        Raises:
            OperationFailed: it cannot be done; the message says how far it came.
        """
        match request:
            case ScalePool():
                return await self._scale(request.pools)
            case RollAll():
                restarted = await self._supervisor.roll(self._drain_timeout_s)
                return Answer(f"{restarted} processes were restarted", self._members())
            case UpgradeTo():
                if self._upgrade is None:
                    raise OperationFailed("upgrade: this deployment was not started from a file")
                return Answer(await self._upgrade.to(request.revision), self._members())
            case AskStatus():
                return Answer("", self._members())

    async def _scale(self, pools: dict[str, int]) -> Answer:
        wanted = {}
        for name, replicas in pools.items():
            if name not in SCALABLE:
                raise OperationFailed(f"{name}: the pools are {' and '.join(SCALABLE)}")
            wanted[Role(name)] = replicas
        for role, replicas in wanted.items():
            await self._supervisor.scale(role, replicas, self._drain_timeout_s)
        said = ", ".join(f"{role}={replicas}" for role, replicas in wanted.items())
        return Answer(said, self._members())

    def _members(self) -> tuple[MemberReport, ...]:
        return tuple(
            MemberReport(
                worker_id=member.spec.worker_id,
                state=member.state,
                ready=member.status is not None and member.status.ready,
                detail=member.status.detail if member.status is not None else "",
                requests=member.status.requests if member.status is not None else 0,
                pages_held=member.status.pages_held if member.status is not None else 0,
                restarts=member.restarts,
            )
            for member in self._supervisor.members
        )
