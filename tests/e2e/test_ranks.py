"""Workers of two ranks each as processes that Ray places: same tokens, and a killed rank ends its worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from actor_processes import actor_processes
from greedy_reference import Reference, make_cases
from token_client import Workers, running_workers

from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import WorkerConfig
from antiphon.protocol.identity import Role

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

CASES = make_cases((1, 65, 300), max_tokens=16)


def rank_processes() -> list[psutil.Process]:
    """Ranks other than 0 of every worker."""
    return actor_processes("RankActor", psutil.Process().children(recursive=True))


def over_two_ranks(pool: WorkerConfig, *, experts: bool) -> WorkerConfig:
    return pool.model_copy(update={"tensor_parallel": 2, "expert_parallel": experts, "rank_timeout_s": 60.0})


async def answered(workers: Workers, reference: Reference) -> None:
    for case, answer in zip(CASES, await asyncio.gather(*map(workers.answer, CASES)), strict=True):
        assert reference.judge(case, answer.token_ids) == 0
    await workers.idle()


async def test_two_ranks_each_say_what_one_says_and_a_killed_rank_is_replaced_with_its_worker(
    local_deployment: DeploymentConfig, checkpoint: Path
) -> None:
    reference = Reference(checkpoint)
    config = local_deployment.model_copy(
        update={
            "prefill": over_two_ranks(local_deployment.prefill, experts=False),
            "decode": over_two_ranks(local_deployment.decode, experts=True),
        }
    )
    async with running_workers(config) as workers:
        await answered(workers, reference)
        before = rank_processes()
        assert len(before) == 2
        epochs = workers.epochs()
        before[0].kill()
        deadline = time.monotonic() + 150
        while len(after := workers.epochs()) < 2 or after == epochs:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert len(epochs.items() & after.items()) == 1, "the other worker went on"
        await workers.until_ready()
        await answered(workers, reference)
        status = workers.status(Role.DECODE)
        assert status.failed is None
    assert not psutil.wait_procs(before, timeout=60)[1]
