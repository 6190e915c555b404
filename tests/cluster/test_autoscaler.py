"""When a pool grows, when it shrinks, and what it does not react to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fake_processes import eventually

from antiphon.cluster.autoscaler import (
    Autoscaler,
    PoolLoad,
    PoolScaler,
    RateMeter,
    decode_workers_needed,
    prefill_workers_needed,
)
from antiphon.cluster.member import Member, MemberState
from antiphon.cluster.process import ProcessStatus
from antiphon.cluster.process_plan import ProcessSpec
from antiphon.cluster.supervisor import OperationFailed
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role, WorkerAddress


def test_prefill_follows_the_seconds_of_its_backlog() -> None:
    assert prefill_workers_needed(PoolLoad(2, 9_000), 2.0) == 2  # nothing is known of its rate yet
    assert prefill_workers_needed(PoolLoad(2, 9_000, tokens_per_s=1_000), 2.0) == 5
    assert prefill_workers_needed(PoolLoad(2, 2_000, tokens_per_s=1_000), 2.0) == 1
    assert prefill_workers_needed(PoolLoad(2, 0, tokens_per_s=1_000), 2.0) == 1


def test_decode_follows_its_pages_and_who_waits_for_them() -> None:
    assert decode_workers_needed(PoolLoad(2, page_use=0.4), 0.8) == 1
    assert decode_workers_needed(PoolLoad(2, page_use=0.9), 0.8) == 3
    assert decode_workers_needed(PoolLoad(2, page_use=0.1, waiting_requests=1), 0.8) == 3


def test_a_pool_grows_at_once_within_its_bounds_and_shrinks_late_and_slowly() -> None:
    scaler = PoolScaler(least=1, most=5, shrink_after_s=60.0)
    assert scaler.decide(1, 9, 0.0) == 2
    assert scaler.decide(2, 9, 1.0) == 4
    assert scaler.decide(4, 9, 2.0) == 5
    assert scaler.decide(5, 1, 10.0) == 5
    assert scaler.decide(5, 5, 50.0) == 5  # a burst: the wait starts over
    assert scaler.decide(5, 1, 60.0) == 5
    assert scaler.decide(5, 1, 119.0) == 5
    assert scaler.decide(5, 1, 120.0) == 4
    assert scaler.decide(4, 1, 121.0) == 4
    assert scaler.decide(4, 0, 180.0) == 3
    assert PoolScaler(least=1, most=5, shrink_after_s=0.0).decide(1, 0, 0.0) == 1


def member(worker_id: str, epoch: int, **figures: float) -> Member:
    role = Role(worker_id.split("-")[0])
    found = Member(ProcessSpec(worker_id, role, 1, 0, 1), MemberState.RUNNING)
    found.address = WorkerAddress(worker_id, role, epoch, "tcp://here")
    found.status = ProcessStatus(worker_id, True, "", None, 0, 0, **figures)  # type: ignore[arg-type]
    return found


def note(meter: RateMeter, epoch: int, tokens: int, now: float) -> None:
    one = member("prefill-0", epoch, computed_prompt_tokens=tokens)
    assert one.status is not None
    meter.note(one, one.status, now)


def test_the_rate_is_the_best_ever_seen_and_never_crosses_a_restart() -> None:
    meter = RateMeter()
    note(meter, 1, 0, 0.0)
    assert meter.tokens_per_s is None
    note(meter, 1, 900, 0.1)  # too soon to say
    assert meter.tokens_per_s is None
    note(meter, 1, 1_000, 1.0)
    note(meter, 1, 1_200, 3.0)
    assert meter.tokens_per_s == 1_000
    note(meter, 2, 90_000, 4.0)
    note(meter, 2, 93_000, 6.0)
    assert meter.tokens_per_s == 1_500


class Pools:
    """A supervisor as far as the autoscaler knows it."""

    def __init__(self, *members: Member) -> None:
        self.members = list(members)
        self.asked: list[tuple[Role, int]] = []
        self.room = 10

    def of_role(self, role: Role) -> list[Member]:
        return [m for m in self.members if m.spec.role is role]

    async def scale(self, role: Role, replicas: int, drain_timeout_s: float) -> None:
        self.asked.append((role, replicas))
        if replicas > self.room:
            raise OperationFailed("no room")
        for index in range(len(self.of_role(role)), replicas):
            self.members.append(member(f"{role}-{index}", 1))


def config(**autoscale: float) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "model": {"path": "none"},
            "decode": {"max_replicas": 3},
            "autoscale": {"interval_s": 0.01, **autoscale},
        }
    )


async def run_until(pools: Pools, happened: Callable[[], bool]) -> None:
    scaler = asyncio.create_task(Autoscaler(pools, config()).run())  # type: ignore[arg-type]
    await eventually(happened, "what is asked of the supervisor")
    assert not scaler.done()
    scaler.cancel()


async def test_only_pools_with_a_bound_change() -> None:
    pools = Pools(
        member("prefill-0", 1, queued_prefill_tokens=10**9), member("decode-0", 1, page_use=0.95, waiting=4)
    )
    await run_until(pools, lambda: (Role.DECODE, 2) in pools.asked)
    assert all(role is Role.DECODE and replicas <= 3 for role, replicas in pools.asked)


async def test_a_pool_on_the_move_is_left_alone() -> None:
    pools = Pools(member("decode-0", 1, page_use=0.95), member("decode-1", 1, page_use=0.95))
    pools.members[1].state = MemberState.LOST
    looked = 0
    of_role = pools.of_role

    def counted(role: Role) -> list[Member]:
        nonlocal looked
        looked += 1
        return of_role(role)

    pools.of_role = counted  # type: ignore[method-assign]
    await run_until(pools, lambda: looked > 10)
    assert not pools.asked


async def test_a_cluster_without_room_does_not_end_the_following() -> None:
    pools = Pools(member("decode-0", 1, page_use=0.95))
    pools.room = 1
    await run_until(pools, lambda: pools.asked.count((Role.DECODE, 2)) > 1)


@pytest.mark.parametrize("bad", [{"max_replicas": 1, "replicas": 2}])
def test_a_bound_below_the_pool_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"decode.max_replicas 1 with decode.replicas 2"):
        DeploymentConfig.model_validate({"model": {"path": "none"}, "decode": bad})
