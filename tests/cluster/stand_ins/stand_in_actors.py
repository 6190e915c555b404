"""Actors with the surface of the real ones and nothing inside, for tests of placement and supervision."""

from __future__ import annotations

import os

from antiphon.cluster.actor_process import ActorProcess
from antiphon.cluster.process import ProcessStatus
from antiphon.protocol.errors import CheckpointError
from antiphon.protocol.identity import Role, Topology, WorkerAddress, new_epoch


class StandInActor(ActorProcess):
    """Says where its process is in ``detail``."""

    ROLE = Role.PREFILL

    def __init__(
        self, worker_id: str, config_json: str, cluster_token: str, served_model: object = None
    ) -> None:
        self._worker_id = worker_id
        self._token = cluster_token
        self._topology = Topology(0, ())

    async def start(self, topology: Topology) -> WorkerAddress:
        return WorkerAddress(self._worker_id, self.ROLE, new_epoch(), f"pid:{os.getpid()}")

    async def set_topology(self, topology: Topology) -> None:
        self._topology = topology

    async def status(self) -> ProcessStatus:
        known = ",".join(sorted(worker.worker_id for worker in self._topology.workers))
        return ProcessStatus(self._worker_id, True, known, None, os.getpid(), len(self._token))

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def stop(self) -> None:
        return None


class StandInDecode(StandInActor):
    ROLE = Role.DECODE


class StandInRouter(StandInActor):
    ROLE = Role.ROUTER


class Unstartable(StandInActor):
    """Its checkpoint is broken."""

    ROLE = Role.DECODE

    async def start(self, topology: Topology) -> WorkerAddress:
        raise CheckpointError("model.safetensors: truncated")


class Defective(StandInActor):
    """Has a programming error where a worker starts."""

    async def start(self, topology: Topology) -> WorkerAddress:
        raise ZeroDivisionError("a defect")
