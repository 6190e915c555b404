"""The actor of a rank other than 0: it follows rank 0 and answers nobody else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon.cluster.actor_process import ActorProcess
from antiphon.cluster.lifeline import Lifeline, lifeline_s
from antiphon.cluster.logs import configure_logs
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role

if TYPE_CHECKING:
    from antiphon.kv_transfer.transport import TransportFactory


END_GRACE_S = 5.0
"""How long a rank that follows nobody any more lives on, for the supervisor to learn why."""


def gpu_of_this_process() -> str:
    """The GPU that Ray reserved for this actor, as CUDA_VISIBLE_DEVICES names it."""
    import ray

    return str(ray.get_gpu_ids()[0])


def see_gpus(gpus: Sequence[str]) -> None:
    """Let this process see these GPUs in this order; before anything loads CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


class RankActor(ActorProcess):
    """Hosts one rank of a worker; ``transport_factory`` makes its KV transport, absent means NIXL."""

    def __init__(
        self,
        role: Role,
        rank: int,
        worker_id: str,
        config_json: str,
        cluster_token: str,
        transport_factory: TransportFactory | None,
    ) -> None:
        self._role = role
        self._rank = rank
        self._worker_id = worker_id
        self._config = DeploymentConfig.model_validate_json(config_json)
        self._cluster_token = cluster_token
        self._transport_factory = transport_factory
        self._lifeline = Lifeline(lifeline_s(self._config.transfer.lease_s))

    async def gpu(self) -> str:
        """Name of this rank's GPU."""
        return gpu_of_this_process()

    async def see_gpus(self, gpus: list[str]) -> None:
        """The GPUs of all ranks, in their order."""
        see_gpus(gpus)

    async def asked(self) -> None:
        """Somebody watches over this worker."""
        self._lifeline.asked()

    async def follow(self, port: int) -> None:
        """Join rank 0, load this rank's part of the model, and follow until rank 0 says stop.

        However that ends, this process does too, as soon as its reason is known: it would keep its part of
        the model, and on a GPU whatever waits for the others, while nobody may be left to end it.
        """
        configure_logs(f"{self._worker_id}/{self._rank}", self._config.log.level)
        try:
            await asyncio.to_thread(self._follow, port)
        finally:
            self._lifeline.cut(END_GRACE_S)

    def _follow(self, port: int) -> None:
        from antiphon.cluster.rank_assembly import follow

        follow(
            self._role,
            self._config,
            self._rank,
            port,
            cluster_token=self._cluster_token,
            transport_factory=self._transport_factory,
        )
