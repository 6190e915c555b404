"""What measures a point: a model held on devices in one layout. The sweep never makes up a figure."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import Layout, Record
from antiphon.benchmarks.sweep.points import Point
from antiphon.model.config import preset
from antiphon.protocol.errors import AntiphonError

if TYPE_CHECKING:  # the engine's benchmark needs a GPU's libraries, and is loaded only where it runs
    from antiphon.benchmarks.engine_model import Bench
    from antiphon.benchmarks.sweep.ranks import RankBench

DeviceType = Literal["cuda", "cpu"]


class NotMeasurable(AntiphonError):
    """This machine, or this build, cannot measure a layout; the message says which of them and why."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each point is measured."""

    steps: int = 128
    repeats: int = 3
    chunk_tokens: int = 8192


class Meter(Protocol):
    """A loaded model."""

    def measure(self, point: Point) -> Record:
        """Measure one point of this meter's model and layout.

        Raises:
            AntiphonError: it could not be measured; the message says why.
        """
        ...


OpenMeter = Callable[[str, Layout, Sequence[Point]], AbstractContextManager[Meter]]
"""(model, layout, points to come) -> a meter; entering loads the model, leaving frees its memory."""


def devices_here(device: DeviceType) -> int:
    """CUDA devices of this machine, or cores that may each be a rank.

    Raises:
        NotMeasurable: there are none.
    """
    if device == "cpu":
        return len(os.sched_getaffinity(0))
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise NotMeasurable("no CUDA device here: a sweep only measures; `antiphon plan` predicts")
    return count


class EngineMeter:
    """The real engine loop on one device, weights synthesized there.

    On a GPU prompts run with FP8 experts beside the 4-bit ones where both fit, decode steps with the 4-bit
    ones alone, as the two roles are deployed; the weights are made anew when the role changes.
    """

    def __init__(self, model: str, device: DeviceType, effort: Effort) -> None:
        self._model, self._device, self._effort = model, device, effort
        self._fp8_fits = device == "cuda" and build(model, []).holds_fp8(Layout())
        self._bench: Bench | None = None

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        return measure_with(
            self._ready(resident_fp8=self._fp8_fits and point.input_tokens is not None), point, self._effort
        )

    def close(self) -> None:
        """Free the weights."""
        self._bench = None
        free_memory()

    def _ready(self, *, resident_fp8: bool) -> Bench:
        import torch

        from antiphon.benchmarks import engine_model

        if self._device == "cpu":
            torch.set_num_threads(1)  # as many as every rank of a wider layout has
        if self._bench is None or self._bench.resident_fp8 != resident_fp8:
            self.close()
            self._bench = engine_model.make_bench(self._model, torch.device(self._device), resident_fp8)
        return self._bench


class RankMeter:
    """The same engine loop with its model spread over ranks, weights synthesized on each.

    As on one device, prompts run with FP8 experts beside the 4-bit ones where both fit; the ranks start anew
    when the role changes.
    """

    def __init__(
        self, model: str, layout: Layout, points: Sequence[Point], device: DeviceType, effort: Effort
    ) -> None:
        self._model, self._layout, self._points = model, layout, points
        self._device, self._effort = device, effort
        self._fp8_fits = device == "cuda" and layout.ep > 1 and build(model, []).holds_fp8(layout)
        self._stack = ExitStack()
        self._bench: RankBench | None = None

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        bench = self._ready(resident_fp8=self._fp8_fits and point.input_tokens is not None)
        record = measure_with(bench, point, self._effort)
        floor_s = layout_floor_s(
            preset(point.model), self._layout, point.input_tokens, point.batch, point.context
        )
        extra = record.extra | {"ranks": bench.road}
        return replace(record, layout=self._layout.name, floor=round(floor_s * 1e3, 4), extra=extra)

    def close(self) -> None:
        """End the ranks."""
        self._bench = None
        free_memory()
        self._stack.close()
        free_memory()

    def _ready(self, *, resident_fp8: bool) -> RankBench:
        from antiphon.benchmarks.sweep.ranks import RankPlan, open_rank_bench, pages_for

        if self._bench is None or self._bench.resident_fp8 != resident_fp8:
            self.close()
            # Where both roles hold the same weights, the ranks have pages for every point.
            mine = [
                p for p in self._points if not self._fp8_fits or (p.input_tokens is not None) == resident_fp8
            ]
            pages = pages_for(preset(self._model), mine, self._effort.steps, self._effort.chunk_tokens)
            plan = RankPlan(self._model, self._layout, self._device, pages, resident_fp8)
            self._bench = self._stack.enter_context(open_rank_bench(plan))
        return self._bench


def measure_with(bench: Bench, point: Point, effort: Effort) -> Record:
    """One point with a loaded model; the engine of the point before is gone first.

    Raises:
        NotMeasurable: the point is neither a prompt nor a decode step.
        BenchmarkError: the engine did not do what was to be timed.
    """
    from antiphon.benchmarks import engine

    free_memory()
    if point.input_tokens is not None:
        return engine.prefill_point(bench, point.input_tokens, effort.chunk_tokens, effort.repeats)
    if point.batch is None or point.context is None:
        raise NotMeasurable(f"{point.name}: a decode step has a batch and a context")
    return engine.decode_point(bench, point.batch, point.context, effort.steps)


def engine_opener(device: DeviceType, effort: Effort) -> OpenMeter:
    """Opens the engine's meter for any layout of one replica or several."""

    @contextmanager
    def open_engine(model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        if layout.dp > 1:
            from antiphon.benchmarks.sweep.replicas import open_replicas

            with open_replicas(model, layout, points, device, effort) as meter:
                yield meter
            return
        single: EngineMeter | RankMeter = (
            RankMeter(model, layout, points, device, effort)
            if layout.tp > 1
            else EngineMeter(model, device, effort)
        )
        try:
            yield single
        finally:
            single.close()

    return open_engine


def free_memory() -> None:
    """What is not referenced any more must be gone from the device before the next takes its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
