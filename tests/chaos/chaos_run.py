"""A deployment of real processes under load; workers are killed, stopped and restarted and links are cut.

    python tests/chaos/chaos_run.py [--seed N] [--requests N] [--output DIR] [--unfenced]

Exit status 0 only when every request ended, every answer is the undisturbed one, and afterwards nothing is
held anywhere. Linux only; without root it needs user namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import chaos_network
import httpx
from chaos_actors import ChaosDecode, ChaosPrefill, ChaosRouter, UnfencedDecode
from chaos_clients import Client, Reference, Refused, Tally, ask_reference, make_cases
from chaos_cluster import ObservedCluster
from chaos_faults import Faults
from chaos_report import Report, Sample, sample

from antiphon.cluster import member as member_module
from antiphon.cluster.member import MemberState
from antiphon.cluster.process import ProcessDied
from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.resolution import resolve_deployment
from antiphon.cluster.supervisor import Supervisor
from antiphon.configs.schema import DeploymentConfig
from antiphon.model.checkpoint.synthesize import synthesize
from antiphon.protocol.identity import Role

CASES = 32
NOBODY = "http://127.0.0.1:9"
"""Asked while no router runs."""
READY_S = 180.0
SUSPICIOUS_S = 90.0
"""Requests that are open for longer are described on standard error."""
LONGEST_BACKOFF_S = 1.0
"""Between lives: they end on purpose here, however often in a row."""
QUIET_S = 60.0
"""After the last fault and the last request, everything must be free and everybody ready within this."""


def configuration(checkpoint: Path) -> DeploymentConfig:
    """Two of everything; pages so few that they are used again at once, leases short enough to run out."""
    return DeploymentConfig.model_validate(
        {
            "model": {"path": str(checkpoint), "served_name": "gpt-oss-tiny", "dtype": "float32"},
            "router": {
                "replicas": 2,
                "host": "0.0.0.0",
                "port": 0,
                "max_in_flight_requests": 10,
                "max_queued_requests": 4,
                "max_attempts": 30,
                "drain_timeout_s": 5,
                "worker_replacement_wait_s": 120,
                "current_date": "2026-01-01",
            },
            "prefill": {
                "replicas": 2,
                "chunk_tokens": 128,
                "kv_cache": {"page_size_tokens": 16, "full_pages": 256, "sliding_pages": 128},
            },
            "decode": {
                "replicas": 2,
                "chunk_tokens": 128,
                "max_batch_size": 8,
                "max_reservations_waiting": 4,
                "kv_cache": {"page_size_tokens": 16, "full_pages": 64, "sliding_pages": 96},
            },
            "transfer": {"lease_s": 5.0, "heartbeat_s": 0.5, "completion_timeout_s": 0.6},
            "log": {"level": "warning"},
        }
    )


class Run:
    """One run on one deployment."""

    def __init__(self, options: argparse.Namespace, supervisor: Supervisor, cluster: ObservedCluster) -> None:
        self.options = options
        self.supervisor = supervisor
        self.cluster = cluster
        self.tally = Tally()
        self.samples: list[Sample] = []
        self._clients: list[Client] = []
        self._leaving = random.Random(f"{options.seed} leaving")
        self.began = time.monotonic()

    async def go(self, config: DeploymentConfig, network: chaos_network.Network) -> Report:
        """Reference, load with faults, rest; then everything is counted."""
        options = self.options
        rng = random.Random(options.seed)
        cases = make_cases(rng, min(CASES, max(8, options.requests // 8)), short=options.soak)
        limits = httpx.Limits(max_connections=options.clients * 2)
        async with httpx.AsyncClient(timeout=httpx.Timeout(300.0), trust_env=False, limits=limits) as http:
            reference = await self._reference(http, cases)
            await self._idle()
            before = await self._whole_sample()
            say(f"{len(cases)} undisturbed answers after {time.monotonic() - self.began:.0f} s")
            faults = Faults(
                self.supervisor,
                self.cluster.actors,
                network,
                rng,
                self.hang_up,
                lease_s=config.transfer.lease_s,
                began=self.began,
            )
            watching = asyncio.create_task(self._watch(faults))
            load_began = time.monotonic() - self.began
            await self._load(http, cases, reference, faults)
            load_ended = time.monotonic() - self.began
            held = await self._rest()
            watching.cancel()
        after = await self._whole_sample()
        return Report(
            options,
            self.tally,
            faults.record,
            before,
            after,
            self.samples,
            held,
            self.began,
            load_began,
            load_ended,
        )

    def urls(self) -> tuple[str, ...]:
        """Where the routers that run listen."""
        routers = self.supervisor.topology.of_role(Role.ROUTER)
        return tuple(router.endpoint for router in routers)

    async def wait_ready(self) -> None:
        """Until every process does its part."""
        async with asyncio.timeout(READY_S):
            while True:
                if all(m.status is not None and m.status.ready for m in self.supervisor.members):
                    return
                await asyncio.sleep(0.1)

    async def _reference(self, http: httpx.AsyncClient, cases: list[dict[str, Any]]) -> list[Reference]:
        answers = []
        for case in cases:
            while True:
                url = next(iter(self.urls()), NOBODY)
                try:
                    answers.append(await ask_reference(http, url, case))
                    break
                except (Refused, httpx.TransportError):
                    await asyncio.sleep(0.2)
        return answers

    async def _load(
        self, http: httpx.AsyncClient, cases: list[dict[str, Any]], reference: list[Reference], faults: Faults
    ) -> None:
        """Clients go on until enough was asked and every fault has struck."""
        asked = 0

        def progress() -> float:
            return sum(self.tally.outcomes.values()) / self.options.requests

        striking = asyncio.create_task(faults.run(self.options.scale, progress))

        def take() -> bool:
            nonlocal asked
            asked += 1
            if self._proven():
                return False
            return asked <= self.options.requests or not striking.done()

        self._clients = [
            Client(
                index,
                self.options.seed,
                cases,
                reference,
                lambda: self.urls() or (NOBODY,),
                self.tally,
            )
            for index in range(self.options.clients)
        ]
        await asyncio.gather(*(client.run(http, take) for client in self._clients))
        if self._proven():
            striking.cancel()
        await asyncio.wait({striking})
        if not striking.cancelled():
            striking.result()

    def _proven(self) -> bool:
        """Whether a run without a fence has shown what it is for."""
        return bool(self.options.unfenced and self.tally.wrong)

    def hang_up(self, share: float) -> None:
        """Let about this share of the clients leave that wait for the beginning of a stream."""
        for client in self._clients:
            if self._leaving.random() < share:
                client.hang_up()

    async def _watch(self, faults: Faults) -> None:
        said = 0.0
        while True:
            self.samples.append(await sample(self.cluster.actors, self.began))
            if time.monotonic() - said > 10:
                said = time.monotonic()
                await self._tell_of_old()
                done = dict(self.tally.outcomes)
                struck, wrong = len(faults.record.struck), len(self.tally.wrong)
                say(f"{said - self.began:5.0f} s: {done}, faults {struck}, wrong {wrong}")
            await asyncio.sleep(1.0)

    async def _tell_of_old(self) -> None:
        """Say what is known of requests that take suspiciously long."""
        actors = dict(self.cluster.actors)
        for name in [name for name in actors if name.startswith("router")]:
            for line in await self._or_nothing(actors[name].old(SUSPICIOUS_S)) or ():
                say(f"old at {name}: {line}")
                for other in [other for other in actors if not other.startswith("router")]:
                    say(f"  {await self._or_nothing(actors[other].about(line.split()[0]))}")

    async def _or_nothing(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except Exception:  # it is dead, stopped or not there yet
            return None

    async def _rest(self) -> dict[str, int]:
        """Wait until everybody runs and nothing is held; what is held when patience ends."""
        held: dict[str, int] = {"nobody was asked": 1}
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline and held:
            await asyncio.sleep(0.5)
            held = await self._held()
        return held

    async def _idle(self) -> None:
        await self._rest()

    async def _whole_sample(self) -> Sample:
        """Of every process, also where one takes its time to answer."""
        deadline = time.monotonic() + QUIET_S
        while True:
            found = await sample(self.cluster.actors, self.began)
            if self.cluster.actors.keys() <= found.usage.keys() or time.monotonic() > deadline:
                return found

    async def _held(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for member in self.supervisor.members:
            name = member.spec.worker_id
            if member.state is not MemberState.RUNNING or member.handle is None:
                held[f"{name} is {member.state}"] += 1
                continue
            try:
                status = await member.handle.status()
                states = await self.cluster.actors[name].states()
            except (ProcessDied, TimeoutError) as error:
                held[f"{name} does not answer: {type(error).__name__}"] += 1
                continue
            held[f"{name}: requests"] += status.requests
            held[f"{name}: pages"] += status.pages_held
            held[f"{name}: not ready: {status.detail}"] += not status.ready
            held.update({f"{name}: {state}": n for state, n in states.items()})
        return {what: count for what, count in held.items() if count}


async def run(options: argparse.Namespace) -> Report:
    """Start a deployment, disturb it, end it."""
    checkpoint = options.output / "checkpoint"
    if not checkpoint.exists():
        synthesize(checkpoint, like="tiny", seed=1)
    config = configuration(checkpoint)
    specs = plan_processes(config)
    kinds = {
        Role.PREFILL: ChaosPrefill,
        Role.DECODE: UnfencedDecode if options.unfenced else ChaosDecode,
        Role.ROUTER: ChaosRouter,
    }
    member_module.LONGEST_BACKOFF_S = LONGEST_BACKOFF_S
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": chaos_network.DEVICE}
    with (
        chaos_network.Network(spec.worker_id for spec in specs) as network,
        ObservedCluster(resolve_deployment(config), specs, actor_kinds=kinds) as cluster,
    ):
        transfer = config.transfer
        supervisor = Supervisor(specs, cluster, lease_s=transfer.lease_s, heartbeat_s=transfer.heartbeat_s)
        try:
            await supervisor.start()
            running = Run(options, supervisor, cluster)
            await running.wait_ready()
            say(f"{len(specs)} processes are ready")
            return await running.go(config, network)
        finally:
            await supervisor.stop(5.0)


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"chaos: {text}\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--scale", type=float, default=None, help="faults, 1.0 is all of them")
    parser.add_argument("--output", type=Path, default=Path(".cache/chaos"))
    parser.add_argument(
        "--unfenced", action="store_true", help="give pages back though a peer may write them"
    )
    parser.add_argument("--soak", action="store_true", help="no faults, short requests, flat memory")
    options = parser.parse_args()
    chaos_network.isolate()
    options.seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    if options.scale is None:
        options.scale = 0.0 if options.soak else options.requests / 2000
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    say(f"SEED={options.seed} REQUESTS={options.requests}")
    report = asyncio.run(run(options))
    report.write(options.output)
    sys.stdout.write(report.summary() + "\n")
    return 0 if not report.failures() else 1


if __name__ == "__main__":
    sys.exit(main())
