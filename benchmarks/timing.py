"""Timing on a GPU: launches captured in a CUDA graph, replayed, median of replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_time_us(
    launches: Sequence[Callable[[], object]], replays: int = 11, warmup: int = 3, rounds: int = 1
) -> float:
    """Median time of one launch in microseconds.

    ``launches`` run one after the other inside one CUDA graph, ``rounds`` times over: give one callable per
    set of inputs, enough sets that the L2 cache does not serve them.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A library that joins ranks asks for its events on a thread of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for launch in launches:
                launch()
    samples = []
    for index in range(warmup + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= warmup:
            samples.append(start.elapsed_time(end) * 1e3 / (len(launches) * rounds))
    return float(statistics.median(samples))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN if ``out`` holds any NaN."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm())
