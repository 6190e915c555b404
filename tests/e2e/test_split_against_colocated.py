"""Both arrangements of the comparison as real deployments under real load, with the same answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from antiphon.benchmarks.split.arrangements import Arrangement, colocated_of, split_of
from antiphon.benchmarks.split.host import start_server
from antiphon.benchmarks.split.ladder import Ladder
from antiphon.benchmarks.split.loads import FixedLoads
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import LoadRun
from antiphon.benchmarks.split.run import HttpLoad, run_comparison
from antiphon.benchmarks.split.verdict import comparison, sentence
from antiphon.configs.schema import DeploymentConfig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

PROMPT = [1000 + 7 * position for position in range(150)]


async def test_both_serve_the_same_load_with_the_same_answers(
    local_deployment: DeploymentConfig, tmp_path: Path
) -> None:
    texts: dict[str, str] = {}
    decisions: dict[str, str] = {}

    @asynccontextmanager
    async def start(arrangement: Arrangement) -> AsyncIterator[str]:
        async with start_server(arrangement) as url:
            async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
                body = {"model": "gpt-oss-tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                texts[arrangement.name] = answer["choices"][0]["text"]
                decisions[arrangement.name] = (await client.get("/metrics")).text
            yield url

    ladder = Ladder(3.0, 2.0, 3.0, 4.0, 0.5, 60_000.0, 60_000.0, 0.9, refine=0)
    load, mix = HttpLoad(FixedLoads(ladder, {}).ladders, "CPU", "gpt-oss-tiny"), Mix("tiny", 70, 6)
    runs: list[LoadRun] = []
    await run_comparison(
        [split_of(local_deployment), colocated_of(local_deployment, 64)],
        [mix],
        load,
        tmp_path / "split.json",
        again=False,
        on_run=lambda run, known: runs.append(run),
        start=start,
    )
    assert [(run.arrangement, run.chunk_tokens, run.gpus) for run in runs] == [
        ("split", None, 2),
        ("colocated", 64, 2),
    ]
    for run in runs:
        assert run.requests
        assert not run.failed
        assert run.share(60_000.0, 60_000.0) == 1.0
    assert texts["split"] == texts["colocated"]
    assert 'reason="computed_by_decode"' in decisions["colocated"]
    assert 'reason="computed_by_decode"' not in decisions["split"]
    rows = comparison(runs, 60_000.0, (60_000.0,), 0.9)
    assert "the split" in sentence(mix.name, rows)
