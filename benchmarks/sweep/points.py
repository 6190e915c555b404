"""What a sweep measures: every layout that fits, prompts by length, decode steps by batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import LAYOUTS
from antiphon.benchmarks.records import BENCH_DECODE, BENCH_PREFILL, Layout, Record

MODELS = ("gpt-oss-20b", "gpt-oss-120b")
INPUT_TOKENS = (*(2**power for power in range(10, 17)), 131_072 - 64)
"""1k to 128k; the longest leaves a page for the answer."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (8192, 32768)


@dataclass(frozen=True, slots=True)
class Point:
    """One figure to measure."""

    bench: str
    model: str
    layout: Layout
    input_tokens: int | None = None
    batch: int | None = None
    """Sequences of one replica."""
    context: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        if self.bench == BENCH_PREFILL:
            return f"{self.model} {self.layout.name}, prompt of {self.input_tokens}"
        return f"{self.model} {self.layout.name}, {self.batch} x {self.context}"

    def measured_by(self, record: Record, peer: str | None = None) -> bool:
        """Whether a record is this point's figure, of this project by its defaults or of a peer."""
        return record.is_default and self.names(record, peer)

    def names(self, record: Record, peer: str | None = None) -> bool:
        """Whether a record is of this point, whatever the model was told."""
        same = (record.bench, record.model, record.layout) == (self.bench, self.model, self.layout.name)
        if not same or record.peer != peer:
            return False
        if self.bench == BENCH_PREFILL:
            return record.input_tokens == self.input_tokens
        return (record.batch, record.context) == (self.batch, self.context)


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of a sweep, and those that cannot be."""

    points: tuple[Point, ...]
    left_out: tuple[tuple[Point, str], ...]
    """(point, why)."""


def layouts_for(gpus: int) -> list[Layout]:
    """Every layout on at most ``gpus`` GPUs: one replica of each, and as many as there is room for."""
    single = [layout for layout in LAYOUTS if layout.gpus <= gpus]
    several = [replace(layout, dp=gpus // layout.tp) for layout in single if gpus // layout.tp > 1]
    return single + several


def grid(
    model: CostModel,
    layouts: Sequence[Layout],
    input_tokens: Sequence[int] = INPUT_TOKENS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> Grid:
    """All points of one model, those that do not fit a GPU's memory left out."""
    points: list[Point] = []
    left_out: list[tuple[Point, str]] = []
    for layout in layouts:
        for tokens in input_tokens:
            point = Point(BENCH_PREFILL, model.model, layout, input_tokens=tokens)
            longest = model.shape.max_context_tokens
            if tokens > longest:
                left_out.append((point, f"the context ends at {longest} tokens"))
            elif model.largest_batch(layout, tokens) < 1:
                left_out.append((point, "the weights and one prompt exceed a GPU's memory"))
            else:
                points.append(point)
        for context in contexts:
            fits = model.largest_batch(layout, context)
            for batch in batches:
                point = Point(BENCH_DECODE, model.model, layout, batch=batch, context=context)
                if batch <= fits:
                    points.append(point)
                else:
                    left_out.append((point, f"memory holds {fits} sequences"))
    return Grid(tuple(points), tuple(left_out))
