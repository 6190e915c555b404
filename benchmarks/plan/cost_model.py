"""Latency and memory of a layout: floors times efficiencies, corrected by whole steps that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.benchmarks import floors, records
from antiphon.benchmarks.plan import work
from antiphon.benchmarks.plan.efficiency import Efficiencies, calibrate
from antiphon.benchmarks.plan.fit import Errors, Row, leave_one_out, non_negative_fit
from antiphon.benchmarks.plan.hardware import H200, Gpu
from antiphon.benchmarks.plan.work import KernelClass
from antiphon.benchmarks.records import Layout, Record
from antiphon.model.config import PRESETS, GptOssConfig, preset

RESERVED_BYTES = 8e9
"""Assumed: CUDA context, graphs, workspaces and communication buffers of one GPU."""
PAGE_TOKENS = 64
WINDOW_PAGES = 3
"""Pages that a window of 128 tokens can touch."""
CHUNK_TOKENS = 8192
FEWEST_STEPS = 6
"""Twice as many as there are factors."""
TOWARDS_ONE = 0.05
"""Pull of a factor to 1, against the squared relative errors of whole steps: see ``non_negative_fit``."""


Groups = tuple[float, float, float]
"""Seconds, or factors, of attention, of experts (and of prefill's other products), and of the rest."""
NOTHING: Groups = (0.0, 0.0, 0.0)
REST = 2
GROUP_OF = {
    KernelClass.ATTENTION_DECODE: 0,
    KernelClass.ATTENTION_PREFILL: 0,
    KernelClass.WINDOW_PREFILL: 0,
    KernelClass.MOE_DECODE: 1,
    KernelClass.ROUTE_DECODE: 1,
    KernelClass.MOE_PREFILL: 1,
    KernelClass.MOE_MIXED: 1,
    KernelClass.DENSE_PREFILL: 1,
}


@dataclass(frozen=True, slots=True)
class Correction:
    """Whole steps against the sum of their kernels: each group of classes has a factor of its own."""

    factors: Groups = (1.0, 1.0, 1.0)
    points: int = 0
    held_out: Errors | None = None
    """Each measured point predicted from all others."""
    layout_points: int = 0
    layout_held_out: Errors | None = None
    """Every layout of several ranks predicted from TP1 alone."""

    def apply(self, groups: Groups) -> float:
        """The corrected time."""
        return sum(factor * seconds for factor, seconds in zip(self.factors, groups, strict=True))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times in seconds, bytes per GPU, for one model on one kind of GPU."""

    model: str
    shape: GptOssConfig
    efficiencies: Efficiencies
    decode_correction: Correction = field(default_factory=Correction)
    prefill_correction: Correction = field(default_factory=Correction)
    measured_points: frozenset[tuple[str, str, int, int]] = frozenset()
    """(bench, layout, batch or input tokens, context or 0) that were measured."""

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.efficiencies.gpu

    def decode_step_s(self, layout: Layout, batch: float, context: float) -> float:
        """One step of ``batch`` sequences of ``context`` tokens each."""
        return self.decode_correction.apply(self.decode_groups_s(layout, batch, context))

    def decode_groups_s(self, layout: Layout, batch: float, context: float) -> Groups:
        """Uncorrected seconds of a step by group of kernel classes."""
        return self._grouped(work.decode_step(self.shape, layout, batch, context))

    def prefill_s(self, layout: Layout, tokens: int, before: int = 0) -> float:
        """``tokens`` of a prompt alone on the worker, in chunks, after ``before`` cached ones."""
        return self.prefill_correction.apply(self.prefill_groups_s(layout, tokens, before))

    def prefill_groups_s(self, layout: Layout, tokens: int, before: int = 0) -> Groups:
        """Uncorrected seconds of a prompt's chunks by group of kernel classes."""
        total, done, end = NOTHING, before, before + tokens
        while done < end:
            chunk = min(CHUNK_TOKENS, end - done)
            total = _plus(total, self._grouped(self._chunk(layout, chunk, done)))
            done += chunk
        return total

    def _grouped(self, parts: work.Parts) -> Groups:
        seconds = [0.0] * len(NOTHING)
        for kind, each in parts.items():
            seconds[GROUP_OF.get(kind, REST)] += self.efficiencies.part_seconds(kind, each)
        return seconds[0], seconds[1], seconds[2]

    def holds_fp8(self, layout: Layout) -> bool:
        """Whether a prefill worker can hold its experts in FP8 beside the 4-bit ones."""
        both = sum(self.weight_bytes(layout, form).experts for form in ("mxfp4", "fp8"))
        rest = self.weight_bytes(layout, "mxfp4")
        prompt = floors.kv_bytes(self.shape, self.shape.max_context_tokens) / layout.tp
        return both + rest.attention + rest.vocabulary + prompt <= self.gpu.memory_bytes - RESERVED_BYTES

    def weight_bytes(
        self, layout: Layout, form: floors.Form = "mxfp4", *, with_unembedding: bool = False
    ) -> floors.WeightBytes:
        """Weights on one GPU."""
        return floors.weights_on_one_gpu(self.shape, layout, form, with_unembedding=with_unembedding)

    def kv_bytes_per_sequence(self, layout: Layout, context: float) -> float:
        """Pages of one sequence on one GPU, the last one of each group taken as full."""
        pages = math.ceil(context / PAGE_TOKENS) * PAGE_TOKENS
        window = min(pages, WINDOW_PAGES * PAGE_TOKENS)
        shape = self.shape
        tokens = len(shape.full_layers) * pages + len(shape.sliding_layers) * window
        return tokens * floors.kv_bytes_per_token_layer(shape) / layout.tp

    def largest_batch(self, layout: Layout, context: float) -> int:
        """Sequences whose pages fit beside a decode worker's weights; 0 when the weights do not fit."""
        weights = self.weight_bytes(layout, with_unembedding=True).total
        free = self.gpu.memory_bytes - RESERVED_BYTES - weights
        return max(0, int(free // self.kv_bytes_per_sequence(layout, context)))

    def assumed_classes(self, layout: Layout) -> dict[str, list[KernelClass]]:
        """By role, the kernel classes whose efficiency is assumed."""
        decode = work.decode_step(self.shape, layout, 1, 1)
        prefill = self._roads(layout, 1, 0)[0]
        found = {"decode": self.efficiencies.assumed(decode), "prefill": self.efficiencies.assumed(prefill)}
        # A correction fitted to whole steps of this model stands for the classes inside them.
        if self.decode_correction.points:
            found["decode"] = [each for each in found["decode"] if each is KernelClass.ALL_REDUCE_SMALL]
        if self.prefill_correction.points:
            found["prefill"] = [each for each in found["prefill"] if each is KernelClass.ALL_REDUCE_LARGE]
        return found

    def _chunk(self, layout: Layout, tokens: int, before: int) -> dict[KernelClass, floors.Work]:
        """A chunk by the quickest road."""
        return min(self._roads(layout, tokens, before), key=self.efficiencies.seconds)

    def _roads(self, layout: Layout, tokens: int, before: int) -> list[dict[KernelClass, floors.Work]]:
        """FP8 experts where they fit beside the 4-bit ones, else those; or streamed, for short chunks."""
        names: tuple[work.Road, ...] = (
            ("fp8", "streamed") if self.holds_fp8(layout) else ("mixed", "streamed")
        )
        return [work.prefill_chunk(self.shape, layout, tokens, before, road=road) for road in names]


def build(model: str, measured: Sequence[Record], gpu: Gpu = H200) -> CostModel:
    """The cost model of ``model``, calibrated on every figure of this GPU that a worker reaches unasked.

    Raises:
        ConfigError: no such model.
    """
    shape = preset(model)
    efficiencies = calibrate(measured, gpu)
    ours = [
        each for each in measured if gpu.name in each.device and each.model in PRESETS and each.is_default
    ]
    decode = _correction(
        ours, records.BENCH_DECODE, lambda name: CostModel(name, preset(name), efficiencies), _decode_groups
    )
    prefill = _correction(
        ours,
        records.BENCH_PREFILL,
        lambda name: CostModel(name, preset(name), efficiencies, decode),
        _prefill_groups,
    )
    points = frozenset(
        (each.bench, each.layout, each.batch or 0, each.context or 0)
        if each.bench == records.BENCH_DECODE
        else (each.bench, each.layout, each.input_tokens or 0, 0)
        for each in ours
        if each.model == model and each.peer is None and each.bench != records.BENCH_KERNEL
    )
    return CostModel(model, shape, efficiencies, decode, prefill, points)


GroupsOf = Callable[[CostModel, Record], tuple[Groups, float]]
"""(group seconds to be corrected, seconds that are known otherwise) of a record's point."""


def _decode_groups(model: CostModel, record: Record) -> tuple[Groups, float]:
    return model.decode_groups_s(Layout.parse(record.layout), record.batch or 1, record.context or 1), 0.0


def _prefill_groups(model: CostModel, record: Record) -> tuple[Groups, float]:
    """Prompt in to first token out: all tokens but the last, then a decode step."""
    layout, tokens = Layout.parse(record.layout), record.input_tokens or 1
    return model.prefill_groups_s(layout, max(1, tokens - 1)), model.decode_step_s(layout, 1, tokens)


def _correction(
    measured: Sequence[Record], bench: str, plain: Callable[[str], CostModel], groups_of: GroupsOf
) -> Correction:
    """Fit whole steps of all models and layouts; none when there are too few."""
    rows: list[Row] = []
    first: list[Row] = []
    others: list[Row] = []
    for record in _fastest(records.select(measured, bench)):
        groups, known_s = groups_of(plain(record.model), record)
        row = (groups, max(1e-9, record.value * 1e-3 - known_s))
        rows.append(row)
        layout = Layout.parse(record.layout)
        if layout == Layout():
            first.append(row)
        elif layout.tp > 1:  # replicas of TP1 are not another layout to predict
            others.append(row)
    if len(rows) < FEWEST_STEPS:
        return Correction()
    attention, experts, rest = non_negative_fit(rows, TOWARDS_ONE)
    across = _across(first, others)
    return Correction(
        (attention, experts, rest), len(rows), leave_one_out(rows, TOWARDS_ONE), len(others), across
    )


def _fastest(found: Sequence[Record]) -> list[Record]:
    """One good record of each point: of several ways to hold the weights, the fastest."""
    best: dict[tuple[object, ...], Record] = {}
    for each in found:
        key = (each.model, each.layout, each.batch, each.input_tokens, each.context)
        if each.extra.get("ok") is not False and (key not in best or each.value < best[key].value):
            best[key] = each
    return list(best.values())


def _across(first: Sequence[Row], others: Sequence[Row]) -> Errors | None:
    if len(first) < FEWEST_STEPS or not others:
        return None
    factors = non_negative_fit(first, TOWARDS_ONE)
    pairs = [(sum(f * s for f, s in zip(factors, groups, strict=True)), value) for groups, value in others]
    return Errors.of(pairs)


def _plus(one: Groups, other: Groups) -> Groups:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
