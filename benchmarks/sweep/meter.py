"""What measures a point: a model held on devices in one layout. The sweep never makes up a figure."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import Layout, Record
from antiphon.benchmarks.sweep.points import Point
from antiphon.model.config import preset
from antiphon.protocol.errors import AntiphonError

if TYPE_CHECKING:  # the engine's benchmark needs a GPU's libraries, and is loaded only where it runs
    from antiphon.benchmarks.sweep.loaded import LoadedModel

DeviceType = Literal["cuda", "cpu"]


class NotMeasurable(AntiphonError):
    """This machine, or this build, cannot measure a layout; the message says which of them and why."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each point is measured."""

    steps: int = 128
    repeats: int = 3
    chunk_tokens: int = 8192
    enough_s: float = math.inf
    """No further prompt of a point is timed once those before it took so long."""


class Meter(Protocol):
    """A loaded model."""

    def measure(self, point: Point) -> Record:
        """Measure one point of this meter's model and layout.

        Raises:
            AntiphonError: it could not be measured; the message says why.
        """
        ...


@runtime_checkable
class MeasuresMore(Protocol):
    """A meter whose points bring figures of others along."""

    def came_along(self) -> Sequence[Record]:
        """Those of the last point."""
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
    """The real engine loop on one device, weights synthesized there: both roles hold the same ones."""

    def __init__(self, model: str, points: Sequence[Point], device: DeviceType, effort: Effort) -> None:
        self._model, self._points, self._device, self._effort = model, points, device, effort
        self._loaded: LoadedModel | None = None

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded.measure(point)

    def close(self) -> None:
        """Free the weights."""
        self._loaded = None
        free_memory()

    def _load(self) -> LoadedModel:
        import torch

        from antiphon.benchmarks import engine_model
        from antiphon.benchmarks.sweep.loaded import LoadedModel

        if self._device == "cpu":
            torch.set_num_threads(1)  # as many as every rank of a wider layout has
        bench = engine_model.make_bench(self._model, torch.device(self._device))
        return LoadedModel(bench, self._points, self._effort)


class RankMeter:
    """The same engine loop with its model spread over ranks, weights synthesized on each."""

    def __init__(
        self,
        model: str,
        layout: Layout,
        points: Sequence[Point],
        device: DeviceType,
        effort: Effort,
        waiting: list[Connection] | None = None,
    ) -> None:
        self._model, self._layout, self._points = model, layout, points
        self._device, self._effort, self._waiting = device, effort, waiting
        self._stack = ExitStack()
        self._loaded: LoadedModel | None = None
        self._ranks = ""

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        if self._loaded is None:
            self._loaded = self._load()
        record = self._loaded.measure(point)
        floor_s = layout_floor_s(
            preset(point.model), self._layout, point.input_tokens, point.batch, point.context
        )
        extra = record.extra | {"ranks": self._ranks}
        return replace(record, layout=self._layout.name, floor=round(floor_s * 1e3, 4), extra=extra)

    def close(self) -> None:
        """End the ranks."""
        self._loaded = None
        free_memory()
        self._stack.close()
        free_memory()

    def _load(self) -> LoadedModel:
        from antiphon.benchmarks.sweep.loaded import LoadedModel
        from antiphon.benchmarks.sweep.ranks import RankPlan, open_rank_bench, pages_for

        pages = pages_for(preset(self._model), self._points, self._effort.steps, self._effort.chunk_tokens)
        plan = RankPlan(self._model, self._layout, self._device, pages)
        bench = self._stack.enter_context(open_rank_bench(plan, self._waiting))
        self._ranks = bench.road
        return LoadedModel(bench, self._points, self._effort)


def engine_opener(device: DeviceType, effort: Effort, waiting: list[Connection] | None = None) -> OpenMeter:
    """Opens the engine's meter for any layout of one replica or several.

    ``waiting`` are pipes to processes that may become further ranks; see ``ranks.open_rank_bench``.
    """

    @contextmanager
    def open_engine(model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        if layout.dp > 1:
            from antiphon.benchmarks.sweep.replicas import open_replicas

            with open_replicas(model, layout, points, device, effort) as meter:
                yield meter
            return
        single: EngineMeter | RankMeter = (
            RankMeter(model, layout, points, device, effort, waiting)
            if layout.tp > 1
            else EngineMeter(model, points, device, effort)
        )
        try:
            yield single
        finally:
            single.close()

    return open_engine


def remote_opener(device: DeviceType, effort: Effort, devices: Sequence[int]) -> OpenMeter:
    """The same in processes of its own, on the devices of these numbers."""

    @contextmanager
    def open_remote(model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        from antiphon.benchmarks.sweep.replicas import open_replicas

        with open_replicas(model, layout, points, device, effort, devices) as meter:
            yield meter

    return open_remote


def free_memory() -> None:
    """What is not referenced any more must be gone from the device before the next takes its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
