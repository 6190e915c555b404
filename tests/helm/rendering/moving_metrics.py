"""Moves every metric that any process declares, with every label, and says what they then export."""

from __future__ import annotations

import itertools
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from antiphon.cluster.member import Member, MemberState
from antiphon.cluster.process import ProcessStatus
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.supervisor_metrics import SupervisorMetrics
from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.metrics import DecodeMetrics
from antiphon.engine.pages import PageState
from antiphon.engine.snapshot import EngineSnapshot
from antiphon.kv_transfer.measured_transport import TransferMetrics
from antiphon.prefill_worker.metrics import PrefillMetrics
from antiphon.protocol.identity import Role, Topology
from antiphon.protocol.messages import FinishReason
from antiphon.protocol.rank_messages import WriteSample
from antiphon.protocol.status import WorkerStatus
from antiphon.router.metrics import STAGES, RouterMetrics
from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopHistogram
from antiphon.telemetry.registry import ProcessRegistry
from antiphon.telemetry.worker_status import FAILURES

VALUES = {
    "role": ("prefill", "decode"),
    "stage": STAGES,
    "status_code": ("200", "503"),
    "reason": ("queue_full", "died"),
}
"""Values of labels that expressions ask for; any other label has one of its own."""

CONFIG = DeploymentConfig.model_validate({"model": {"path": "m"}})
COUNTERS = (*FAILURES, "handshakes_ok", "leases_ended_by_death", "notifications_late", "missing_writes_asked",
            "bytes_sent", "receives_complete", "receives_lost")  # fmt: skip


def turn(metrics: RouterMetrics, chance: random.Random) -> None:
    """Move every metric of a router, with every combination of its labels."""

    def fast() -> float:
        return 10 ** chance.uniform(-3.5, 0.3)

    def slow() -> float:  # beyond every objective, and within the buckets of every histogram
        return 10 ** chance.uniform(0.31, 0.65)

    for metric in vars(metrics).values():
        names = getattr(metric, "_labelnames", ())
        for values in itertools.product(*(VALUES.get(name, ("some",)) for name in names)):
            child = metric.labels(*values) if names else metric
            if hasattr(child, "observe"):
                child.observe(chance.choice((slow, fast))())
            elif hasattr(child, "set"):
                child.set(chance.random())
            elif hasattr(child, "inc"):
                child.inc(chance.randint(1, 5))


class MovingProcesses:
    """One process of each role; every reading finds figures that have moved."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._turns = 0
        self._router = RouterMetrics("m")
        engine: Any = SimpleNamespace(
            snapshot=self._snapshot,
            settings=SimpleNamespace(page_size_tokens=64, full_pages=100, sliding_pages=50),
        )
        workers = {
            "prefill": PrefillMetrics("prefill-0", CONFIG, engine, lambda: self._status(Role.PREFILL)),
            "decode": DecodeMetrics("decode-0", CONFIG, engine, lambda: self._status(Role.DECODE)),
        }
        self._workers = workers
        supervisor = SupervisorMetrics("m", self._members, lambda: Topology(self._turns, ()))
        self._registries: dict[str, ProcessRegistry] = {
            "router": self._router.registry,
            **{role: worker.registry for role, worker in workers.items()},
            "supervisor": supervisor.registry,
        }

    def page(self, process: str) -> str:
        """The text of one process, after everything of it has moved."""
        self._turns += 1
        if process == "router":
            turn(self._router, self._chance)
        elif process in self._workers:
            for part in vars(self._workers[process]).values():
                owned = vars(part).values() if hasattr(part, "__dict__") else ()
                for histogram in (part, *owned):
                    if isinstance(histogram, LoopHistogram):
                        histogram.observe(self._chance.choice(histogram._bounds[:-1]))
            transfers = getattr(self._workers[process], "transfers", None)
            if transfers is not None:
                self._write(transfers)
        return self._registries[process].exposition()[0].decode()

    def _write(self, transfers: TransferMetrics) -> None:
        """Writes of two ranks, some of which stay under way."""
        for rank in range(2):
            seconds = [self._chance.choice(buckets.TRANSFER_S) for _ in range(2)]
            size = int(self._chance.choice(buckets.TRANSFER_BYTES))
            runs = int(self._chance.choice(buckets.DESCRIPTORS))
            transfers.observe(rank, WriteSample(*seconds, size, runs))
        self._chance.choice((transfers.began, transfers.released))()

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(self._registries)

    def _count(self) -> int:
        return self._turns * 10 + self._chance.randint(0, 9)

    def _some(self) -> int:
        return self._chance.randint(1, 20)

    def _snapshot(self) -> EngineSnapshot:
        fields = {
            name: self._count()
            for name in ("steps", "prefix_query_tokens", "computed_prompt_tokens", "received_prompt_tokens")
        }
        return EngineSnapshot(
            running=self._some(),
            waiting=self._some(),
            awaiting_kv=self._some(),
            pinned=self._some(),
            quarantined=self._some(),
            queued_prefill_tokens=self._some(),
            pages={
                group: {state.value: self._some() for state in PageState} for group in ("full", "sliding")
            },
            prefix_hit_tokens=self._count(),
            generated_tokens=self._count(),
            preemptions=self._count(),
            stale_commands=self._count(),
            finished={reason.value: self._count() for reason in FinishReason},
            **fields,
        )

    def _status(self, role: Role) -> WorkerStatus:
        return WorkerStatus(
            worker_id=f"{role}-0",
            role=role,
            epoch=1,
            endpoint="",
            ready=self._chance.random() < 0.5,
            detail="",
            draining=self._chance.random() < 0.5,
            failed=None,
            requests=self._some(),
            pages_held=self._some(),
            pages_quarantined=0,
            queued_prefill_tokens=0,
            kv_peers=("x",) * self._some(),
            counters={name: self._count() for name in COUNTERS},
            overdue_writers=(("x", 1),) * self._some(),
            kv_paths={
                f"peer-{i}": (self._chance.choice(("tcp", "direct", "mapped")), self._chance.random() * 1e9)
                for i in range(self._some())
            },
        )

    def _members(self) -> list[Member]:
        members = []
        for role in (*Role, Role.PREFILL):
            spec = ProcessSpec(f"{role}-0", role, 1, 0, 1)
            status = ProcessStatus(
                spec.worker_id, self._chance.random() < 0.5, "", None, self._some(), self._some()
            )
            state = self._chance.choice(list(MemberState))
            members.append(Member(spec, state=state, status=status, restarts=self._count()))
        # Somebody is always up: otherwise a ratio of pools has no value.
        members[0].state = MemberState.RUNNING
        members += [
            Member(ProcessSpec(f"{role}-1", role, 1, 0, 1), state=MemberState.RUNNING) for role in Role
        ]
        return members


@cache
def exported() -> dict[str, frozenset[str]]:
    """Sample name -> its labels, of everything that any process exports."""
    moving = MovingProcesses(random.Random(0))
    names: dict[str, frozenset[str]] = {}
    for process in moving.processes:
        for family in text_string_to_metric_families(moving.page(process)):
            for sample in family.samples:
                names[sample.name] = names.get(sample.name, frozenset()) | frozenset(sample.labels)
            # Without a sample there was a label whose values this module does not know how to make.
            assert family.samples, family.name
    return names
