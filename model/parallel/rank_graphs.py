"""CUDA graphs of a rank that follows: recorded when rank 0 records its own, replayed when it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from antiphon.protocol.errors import RankLostError


class RankGraphs:
    """Graphs by rank 0's numbers. A step of several parts is one graph for each, under one number.

    All share one memory pool: they are replayed one after the other, and nothing of one is read later, but
    for what a part leaves for the next.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._steps: set[int] = set()
        """Numbers of whole steps, which were cut into parts."""
        self._pool: Any = None  # torch names its type only privately
        self._stream: torch.cuda.Stream | None = None

    def capture(self, number: int, compute: Callable[[], object]) -> None:
        """Record what ``compute`` issues. Other threads of this process go on using the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        self._parts[number] = [graph]

    def capture_parts(self, number: int, compute: Callable[[Callable[[], None]], object]) -> None:
        """As ``capture``; ``compute`` calls its argument between two parts."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            graphs[-1].capture_end()
            self._pool = graphs[-1].pool()

        def cut() -> None:
            end()
            begin()

        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            begin()
            try:
                compute(cut)
            finally:
                end()
        self._parts[number] = graphs
        self._steps.add(number)

    def clear(self) -> None:
        """Let go of all graphs; NCCL's communicator does not end before those that hold its kernels."""
        self._parts.clear()
        self._steps.clear()

    def is_step(self, number: int) -> bool:
        """Whether a number stands for a step that was cut into parts, be it one."""
        return number in self._steps

    def replay(self, number: int, after_part: Callable[[int], None]) -> None:
        """Issue them in order; ``after_part(i)`` is called behind the i-th.

        Raises:
            RankLostError: nothing was captured under this number.
        """
        if number not in self._parts:
            raise RankLostError(f"rank 0 replays graph {number}, which was not captured here")
        for part, graph in enumerate(self._parts[number]):
            graph.replay()
            after_part(part)
