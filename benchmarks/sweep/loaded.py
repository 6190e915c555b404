"""A loaded model that is measured point by point; what points have in common is done once."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.benchmarks import engine, engine_decode
from antiphon.benchmarks.engine_model import Bench, BenchmarkError, free_memory
from antiphon.benchmarks.records import Record
from antiphon.benchmarks.sweep.meter import Effort
from antiphon.benchmarks.sweep.points import Point

SPREAD_CONTEXT = 1024
"""Tokens of context at which a batch's spread over the experts is looked at: it is the tokens' doing."""


class LoadedModel:
    """One bench and the points that are measured on it.

    Decode steps of a context share an engine, so that its graphs are captured and its pages filled once. How
    a batch spreads over the experts is looked at once, whatever the contexts.

    Args:
        points: all that will come; the largest batch of a context is that of its engine.
    """

    def __init__(self, bench: Bench, points: Sequence[Point], effort: Effort) -> None:
        self.bench, self._points, self._effort = bench, points, effort
        self._spreads: dict[int, float] = {}
        self._steps: tuple[int, engine_decode.DecodeSteps] | None = None

    def measure(self, point: Point) -> Record:
        """One point; the engine of another kind of point is gone first.

        Raises:
            BenchmarkError: the engine did not do what was to be timed, or the point is neither a prompt nor a
                decode step.
        """
        effort = self._effort
        if point.input_tokens is not None:
            self._drop_engine()
            return engine.prefill_point(
                self.bench, point.input_tokens, effort.chunk_tokens, effort.repeats, enough_s=effort.enough_s
            )
        if point.batch is None or point.context is None:
            raise BenchmarkError(f"{point.name}: a decode step has a batch and a context")
        steps = self._steps_at(point.context)
        return steps.point(point.batch, self._spreads[point.batch])

    def _steps_at(self, context: int) -> engine_decode.DecodeSteps:
        if self._steps is None or self._steps[0] != context:
            self._drop_engine()
            batches = [point.batch for point in self._points if point.batch and point.context == context]
            for batch in batches:
                if batch not in self._spreads:
                    free_memory()  # over ranks every engine has pages for all points
                    look_at = min(context, SPREAD_CONTEXT)
                    self._spreads[batch] = engine_decode.decode_spread(self.bench, batch, look_at)
            free_memory()
            steps = engine_decode.DecodeSteps(self.bench, max(batches), context, self._effort.steps)
            self._steps = context, steps
        return self._steps[1]

    def _drop_engine(self) -> None:
        self._steps = None
        free_memory()
