"""A cluster whose processes can be asked what the supervisor does not ask."""

from __future__ import annotations

import asyncio
from typing import Any

from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.ray_cluster import RayCluster, RayProcess

ANSWER_S = 5.0
"""Of a process that is asked; one that takes longer is stopped, dead or crowded out."""


class ObservedCluster(RayCluster):
    """Remembers the actor of each process, to ask it what the supervisor does not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.actors: dict[str, Asked] = {}

    def launch(self, spec: ProcessSpec) -> RayProcess:
        process = super().launch(spec)
        self.actors[spec.worker_id] = Asked(process)
        return process


class Asked:
    """The questions of ``chaos_actors.Observed``, by name."""

    def __init__(self, process: RayProcess) -> None:
        self._process = process
        self._pid: int | None = None

    async def known_pid(self) -> int:
        """Its process, which is asked only once."""
        if self._pid is None:
            self._pid = int(await self.pid())
        return self._pid

    def __getattr__(self, name: str) -> Any:
        async def ask_it(*arguments: object) -> Any:
            async with asyncio.timeout(ANSWER_S):
                return await self._process._call(name, *arguments)

        return ask_it
