"""Sum over ranks, residual and RMSNorm for every number of rows that a step may have, in each way there is.

What is fastest up to how many rows belongs into ``model/parallel/reduce_limits.py``, and is printed as it
stands there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from antiphon.benchmarks.rank_process import Rank
from antiphon.benchmarks.records import Layout, Record
from antiphon.kernels import reference
from antiphon.model.parallel.reduce_limits import ReduceLimits

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CPU_ROWS = (1, 8, 64)
WIDTH = 2880
EPS = 1e-5
ONE_SHOT, TWO_SHOT = "peer memory, one launch", "peer memory, two-shot"
LIBRARY = "library, add and norm"

Launch = Callable[[], Tensor]


def sums(rank: Rank) -> None:
    """Time every way and compare their results.

    Raises:
        RuntimeError: ranks hold different sums.
    """
    rows_of = ROWS if rank.fast else CPU_ROWS
    fused = {}
    if rank.fast:
        fused = {
            ONE_SHOT: rank.fused(ReduceLimits(max(rows_of)), WIDTH),
            TWO_SHOT: rank.fused(ReduceLimits(0, max(rows_of)), WIDTH),
        }
    weight = torch.randn(WIDTH, device=rank.device).bfloat16()
    for rows in rows_of:
        part = torch.randn(rows, WIDTH, device=rank.device).bfloat16() * (rank.rank + 1)
        start = torch.randn(rows, WIDTH, device=rank.device).bfloat16()
        expected = start.clone()
        normed = by_library(rank, part.clone(), expected, weight)
        ways: dict[str, tuple[Launch, dict[str, object]]] = {}
        for name, reduce in fused.items():
            x = start.clone()
            found = reduce.add_norm_(part, x, weight, EPS)
            same_everywhere(rank, x, name)
            extra: dict[str, object] = {
                "equal_share": float((x == expected).float().mean()),
                "largest_difference": float((found - normed).abs().max()),
            }
            ways[name] = partial(reduce.add_norm_, part, x, weight, EPS), extra
        scratch, y = part.clone(), start.clone()
        same_everywhere(rank, expected, LIBRARY)
        ways[LIBRARY] = partial(by_library, rank, scratch, y, weight), {}
        for name, (launch, extra) in ways.items():
            value = time_us(rank, launch)
            layout = Layout(tp=rank.size)
            rank.note("all_reduce", "", layout, value, "us", batch=rows, kernel=name, extra=extra)
        rank.save()
    if rank.rank == 0 and fused:
        print(f"reduce_limits: {rank.size}: {crossovers(rank.records)}", flush=True)


def by_library(rank: Rank, part: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The communicator's all-reduce, then the residual and its norm; ``part`` is used up."""
    total = rank.group.communicator.all_reduce(part)
    if rank.fast:
        from antiphon.kernels.dense.norm import add_rms_norm_

        return add_rms_norm_(total, x, weight, EPS)
    x += total
    return reference.rms_norm(x.float(), weight.float(), EPS).to(x.dtype)


def same_everywhere(rank: Rank, x: Tensor, way: str) -> None:
    """Hold that all ranks have the same bits.

    Raises:
        RuntimeError: they do not.
    """
    everyone = rank.group.communicator.all_gather(x)
    if not all(torch.equal(everyone[0], each) for each in everyone):
        raise RuntimeError(f"{way}: ranks hold different sums of {x.shape[0]} rows")


def time_us(rank: Rank, launch: Launch) -> float:
    """Median microseconds; on GPUs of launches in a graph."""
    if rank.fast:
        from antiphon.benchmarks.timing import graph_time_us

        return graph_time_us([launch] * 24)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        launch()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[len(times) // 2]


def crossovers(records: list[Record]) -> ReduceLimits:
    """Up to how many rows each way was the fastest, from the smallest on without a gap."""
    best: dict[int, str] = {}
    by_rows: dict[int, dict[str, float]] = {}
    for record in records:
        if record.bench == "all_reduce" and record.batch is not None:
            by_rows.setdefault(record.batch, {})[record.kernel or ""] = record.value
    for rows, values in sorted(by_rows.items()):
        best[rows] = min(values, key=lambda name: values[name])
    order, at = (ONE_SHOT, TWO_SHOT), 0
    limits = dict.fromkeys(order, 0)
    for rows, name in best.items():
        if name not in order[at:]:
            break
        at = order.index(name)
        limits[name] = rows
    return ReduceLimits(limits[ONE_SHOT], limits[TWO_SHOT])
