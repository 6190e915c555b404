"""What measures a point: a model held on GPUs in one layout. The sweep never makes up a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.records import Layout, Record
from antiphon.benchmarks.sweep.points import Point
from antiphon.protocol.errors import AntiphonError

if TYPE_CHECKING:  # the engine's benchmark needs a GPU's libraries, and is loaded only where it runs
    from antiphon.benchmarks.engine import Bench

STEPS = 128
PREFILL_REPEATS = 3
PREFILL_CHUNK = 8192


class NotMeasurable(AntiphonError):
    """This machine, or this build, cannot measure a layout; the message says which of them and why."""


class Meter(Protocol):
    """A loaded model."""

    def measure(self, point: Point) -> Record:
        """Measure one point of this meter's model and layout.

        Raises:
            AntiphonError: it could not be measured; the message says why.
        """
        ...


OpenMeter = Callable[[str, Layout], AbstractContextManager[Meter]]
"""(model, layout) -> a meter; entering loads the model, leaving frees its memory."""


def gpus_here() -> int:
    """CUDA devices of this machine.

    Raises:
        NotMeasurable: there are none.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise NotMeasurable("no CUDA device here: a sweep only measures; `antiphon plan` predicts")
    return count


class EngineMeter:
    """The real engine loop on one GPU, weights synthesized on the device.

    Prompts run with FP8 experts beside the 4-bit ones where both fit, decode steps with the 4-bit ones alone,
    as the two roles are deployed; the weights are made anew when the role changes.
    """

    def __init__(self, model: str) -> None:
        from antiphon.benchmarks import engine

        self._engine, self._model = engine, model
        self._fp8_fits = build(model, []).holds_fp8(Layout())
        self._bench: Bench | None = None

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        if point.input_tokens is not None:
            bench = self._ready(resident_fp8=self._fp8_fits)
            return self._engine.prefill_point(bench, point.input_tokens, PREFILL_CHUNK, PREFILL_REPEATS)
        if point.batch is None or point.context is None:
            raise NotMeasurable(f"{point.name}: a decode step has a batch and a context")
        return self._engine.decode_point(self._ready(resident_fp8=False), point.batch, point.context, STEPS)

    def close(self) -> None:
        """Free the weights."""
        import torch

        self._bench = None
        torch.cuda.empty_cache()

    def _ready(self, *, resident_fp8: bool) -> Bench:
        import torch

        if self._bench is None or self._bench.resident_fp8 != resident_fp8:
            self.close()
            self._bench = self._engine.make_bench(self._model, torch.device("cuda"), resident_fp8)
        return self._bench


@contextmanager
def open_engine(model: str, layout: Layout) -> Iterator[Meter]:
    """The engine's meter.

    Raises:
        NotMeasurable: the layout has more than one rank, which the engine's benchmark does not start yet.
    """
    if layout.gpus > 1:
        raise NotMeasurable(f"{layout.name}: the engine's benchmark runs on one rank")
    meter = EngineMeter(model)
    try:
        yield meter
    finally:
        meter.close()
