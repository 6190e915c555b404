"""What an executor asks of a device: memory to copy from, work in order, and captured work.

Everything that a step does on the device is issued inside ``submit``, and nothing that the host writes for it
may be written again before its completion was waited for. So a stand-in may run the work at any time between
``submit`` and ``wait``, and shows what relied on luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor


class Completion(Protocol):
    """Work that was submitted."""

    def wait(self) -> None:
        """Block until it, and all work submitted before it, is over."""


class Captured(Protocol):
    """Work that can be issued again and again, in fixed memory."""

    output: Tensor

    def replay(self) -> None:
        """Issue it; ``output`` is overwritten."""


class CapturedParts(Protocol):
    """Work that can be issued again and again in fixed memory, part after part."""

    output: Tensor

    def replay(self, after_part: Callable[[int], None]) -> None:
        """Issue it; ``after_part(i)`` is called when the i-th part was issued. ``output`` is overwritten."""


class DeviceRuntime(Protocol):
    """One device and the one stream on which an engine's steps run."""

    device: torch.device

    def host_memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies to and from the device can use without the host's help."""

    def submit(self, issue: Callable[[], None]) -> Completion:
        """Run ``issue``, which only issues work and never waits for it."""

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        """Record what ``compute`` issues. It has run before, and does so in memory that never moves."""

    def capture_parts(self, compute: Callable[[Callable[[], None]], Tensor]) -> CapturedParts:
        """As ``capture``; ``compute`` calls its argument between two parts, each time equally often."""


@dataclass(frozen=True, slots=True)
class Over:
    """Work that was over when ``submit`` returned."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Recomputed:
    """A stand-in for a graph: computes again, into the same output."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = compute().clone()

    def replay(self) -> None:
        """Compute again."""
        self.output.copy_(self._compute())


class RecomputedParts:
    """A stand-in for graphs that follow one another: computes again, and stops between the parts."""

    def __init__(self, compute: Callable[[Callable[[], None]], Tensor]) -> None:
        self._compute = compute
        self.output = compute(_go_straight_on).clone()

    def replay(self, after_part: Callable[[int], None]) -> None:
        """Compute again."""
        parts = count()
        self.output.copy_(self._compute(lambda: after_part(next(parts))))
        after_part(next(parts))


def _go_straight_on() -> None:
    """Nothing happens between two parts."""


class HostRuntime:
    """The CPU as a device: work is over when it was issued."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def host_memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(*shape, dtype=dtype)

    @torch.inference_mode()
    def submit(self, issue: Callable[[], None]) -> Completion:
        """Run it."""
        issue()
        return Over()

    @torch.inference_mode()
    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        """See ``Recomputed``."""
        return Recomputed(compute)

    @torch.inference_mode()
    def capture_parts(self, compute: Callable[[Callable[[], None]], Tensor]) -> CapturedParts:
        """See ``RecomputedParts``."""
        return RecomputedParts(compute)


class _CudaCompletion:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class _CudaGraphs:
    """Graphs of one memory pool, of which each leaves in it what the next one reads."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], output: Tensor) -> None:
        self._graphs = graphs
        self.output = output

    def replay(self, after_part: Callable[[int], None]) -> None:
        for part, graph in enumerate(self._graphs):
            graph.replay()
            after_part(part)


_ERROR_MODE = "thread_local"
"""Other threads use the device while this one captures: NCCL's own asks it whether a collective is over."""


class CudaRuntime:
    """A CUDA device and the current stream of the thread that submits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # torch names its type only privately
        self._aside: torch.cuda.Stream | None = None

    def host_memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    @torch.inference_mode()
    def submit(self, issue: Callable[[], None]) -> Completion:
        """Issue it on the current stream, and an event behind it."""
        with torch.cuda.device(self.device):
            issue()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _CudaCompletion(event)

    @torch.inference_mode()
    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        """Run it once, to compile kernels and set up libraries, then record it.

        All graphs share one memory pool, which is sound because they are replayed one after the other on one
        stream; only outputs, which live on, are kept apart.
        """
        with torch.cuda.device(self.device):
            self._run_aside(compute)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_ERROR_MODE):
                output = compute()
            self._pool = graph.pool()
        return _CudaGraph(graph, output)

    @torch.inference_mode()
    def capture_parts(self, compute: Callable[[Callable[[], None]], Tensor]) -> CapturedParts:
        """See ``capture``. What one part allocates and a later one reads stays in place: the pool takes
        memory back only when ``compute`` lets go of it, and parts are replayed in the order of their capture.
        """
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode=_ERROR_MODE)

        def cut() -> None:
            graphs[-1].capture_end()
            self._pool = graphs[-1].pool()
            begin()

        with torch.cuda.device(self.device):
            self._run_aside(lambda: compute(_go_straight_on))
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream()):
                begin()
                try:
                    output = compute(cut)
                finally:
                    graphs[-1].capture_end()
            self._pool = graphs[-1].pool()
        return _CudaGraphs(graphs, output)

    def _stream(self) -> torch.cuda.Stream:
        """Where work is recorded. Always the same one: libraries hold a workspace for each stream."""
        if self._aside is None:
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._aside

    def _run_aside(self, compute: Callable[[], Tensor]) -> None:
        """Run it as it will be recorded: kernels are compiled and libraries set up afterwards."""
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)


def runtime_for(device: torch.device) -> DeviceRuntime:
    """The runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else HostRuntime()
