"""``antiphon bench split``: the split against colocated engines on the same GPUs, by real HTTP load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from antiphon.benchmarks.peers.meter import PeerSystem
from antiphon.benchmarks.peers.replicas import PeerReplicas
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import load_results
from antiphon.benchmarks.split.arrangements import Arrangement, colocated_of, ranks_of, split_of
from antiphon.benchmarks.split.ladder import FEWEST_REQUESTS, Ladder
from antiphon.benchmarks.split.loads import ExpectedLoads, FixedLoads, Seconds
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import LoadRun, load_runs
from antiphon.benchmarks.split.run import (
    DRAIN_S,
    HttpLoad,
    device_name,
    differences_now,
    run_comparison,
)
from antiphon.benchmarks.split.verdict import Row, comparison
from antiphon.configs.schema import DeploymentConfig

LONGEST_TOKENS = 8192
"""Prompt and answer of the mixes' longest request, and room."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request keeps."""

    ttft_ms: float
    itl_ms: tuple[float, ...]
    attainment: float


def arrangements_of(
    config: DeploymentConfig,
    chunks: Sequence[int],
    servers: Sequence[tuple[str, str]],
    peer: tuple[PeerSystem, Sequence[int]] | None = None,
) -> list[Arrangement]:
    """The split, a colocated deployment for each chunk, servers that run already (name, URL), and replicas of
    another system for each of its chunks.

    Raises:
        ConfigError: the configuration is no split, or a chunk does not go with its pages.
    """
    split = split_of(config)
    found = [split, *(colocated_of(config, chunk) for chunk in chunks)]
    found += [Arrangement(name, split.gpus, url=url) for name, url in servers]
    if peer is not None:
        system, theirs = peer
        found += [_replicas_of(config, split.gpus, system, chunk) for chunk in theirs]
    return found


def _replicas_of(config: DeploymentConfig, gpus: int, system: PeerSystem, chunk: int) -> Arrangement:
    """One on each GPU, with as many places as a decode worker has."""
    replicas = PeerReplicas(
        system,
        config.model.name,
        gpus,
        chunk,
        config.decode.max_batch_size,
        LONGEST_TOKENS,
        config.decode.device == "cuda",
    )
    return Arrangement(f"{system.label} replicas", gpus, chunk, replicas=replicas)


def run_command(
    config: DeploymentConfig,
    mixes: Sequence[Mix],
    limits: Limits,
    *,
    chunks: Sequence[int],
    servers: Sequence[tuple[str, str]] = (),
    peer: tuple[PeerSystem, Sequence[int]] | None = None,
    only: Sequence[str] = (),
    first_rate_per_s: float | None = 0.5,
    step: float = 1.5,
    highest_rate_per_s: float = math.inf,
    refine: int = 1,
    duration_s: float = 60.0,
    warmup_s: float = 10.0,
    seconds: Mapping[str, Seconds] | None = None,
    drain_s: float = DRAIN_S,
    output: Path,
    again: bool = False,
    limit_s: float = math.inf,
    seed: int = 0,
) -> None:
    """Measure what ``output`` does not hold yet, then print goodput by limit and who wins.

    Args:
        first_rate_per_s: where every ladder begins; None begins each near what the cost model expects,
            searches for each limit, and starts loads with the requests that a steady load has in service.
        seconds: durations and warm-ups of mixes by name, in place of the common ones.
        drain_s: longest wait for answers after a load's last request.

    Raises:
        AntiphonError: an arrangement cannot be made, started or measured, or the time is over; what was
            measured is kept and printed.
    """
    wanted = [each for each in arrangements_of(config, chunks, servers, peer) if _asked_for(each, only)]
    if first_rate_per_s is None:  # any that is allowed, where ladders begin elsewhere
        least_s = duration_s - warmup_s
        begin_per_s = FEWEST_REQUESTS / least_s if least_s > 0 else 1.0
    else:
        begin_per_s = first_rate_per_s
    ladder = Ladder(
        begin_per_s,
        step,
        highest_rate_per_s,
        duration_s,
        warmup_s,
        limits.ttft_ms,
        max(limits.itl_ms),
        limits.attainment,
        refine,
    )
    device = device_name("cuda" in (config.prefill.device, config.decode.device))
    loads: FixedLoads | ExpectedLoads = FixedLoads(ladder, seconds or {})
    if first_rate_per_s is None:
        model = build(config.model.name, load_results())
        loads = ExpectedLoads(ladder, seconds or {}, limits.itl_ms, model, wanted)
    load = HttpLoad(loads.ladders, device, config.model.name, seed, drain_s, loads.standing)
    console = Console(stderr=True)

    def on_run(run: LoadRun, known: bool) -> None:
        console.print(
            f"{'known' if known else 'done '}  {describe(run, limits)}", markup=False, highlight=False
        )

    async def all_runs() -> None:
        await run_comparison(wanted, mixes, load, output, again=again, on_run=on_run, limit_s=limit_s)

    try:
        uvloop.run(all_runs())
    finally:
        place = load.model, load.device, ranks_of(config)
        runs = [
            run
            for run in load_runs(output)
            if (run.model, run.device, run.gpus) == place
            and not differences_now(run, wanted, mixes, load)  # left by a repetition that was broken off
        ]
        print_comparison(runs, mixes, limits)


def _asked_for(arrangement: Arrangement, only: Sequence[str]) -> bool:
    kinds = {arrangement.name} | ({"replicas"} if arrangement.replicas is not None else set())
    return not only or not kinds.isdisjoint(only)


def describe(run: LoadRun, limits: Limits) -> str:
    """One line about a run."""
    shares = ", ".join(
        f"{run.share(limits.ttft_ms, itl):.0%} within {itl:g} ms" for itl in sorted(limits.itl_ms)
    )
    chunk = "" if run.chunk_tokens is None else f" chunk {run.chunk_tokens}"
    return f"{run.mix}, {run.arrangement}{chunk}, {run.rate_per_s:g}/s: {shares}"


def print_comparison(runs: Sequence[LoadRun], mixes: Sequence[Mix], limits: Limits) -> None:
    """Goodput of each arrangement under each limit."""
    console = Console()
    for mix in mixes:
        mine = [run for run in runs if run.mix == mix.name]
        lengths = f"{mix.input_tokens} in, {mix.output_tokens} out"
        table = Table(
            "ITL limit",
            "arrangement",
            "goodput/s",
            "TTFT p50 / p99 ms",
            "ITL p50 / p99 ms",
            "against the split",
            title=f"{mix.name}: {lengths}, TTFT within {limits.ttft_ms:g} ms",
        )
        for row in comparison(mine, limits.ttft_ms, limits.itl_ms, limits.attainment):
            table.add_row(*cells(row))
        console.print(table)


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts."""
    if row.best is None:
        return (f"{row.itl_ms:g} ms", row.label, row.goodput, "–", "–", "–")
    run = row.best.run
    ratio = "–" if row.against_split is None else f"{row.against_split:.2f}x"
    return (
        f"{row.itl_ms:g} ms",
        row.label,
        row.goodput,
        _pair(run.ttft_p50_p99_ms),
        _pair(run.itl_p50_p99_ms),
        ratio,
    )


def _pair(values: tuple[float, float] | None) -> str:
    return "–" if values is None else f"{values[0]:,.1f} / {values[1]:,.1f}"
