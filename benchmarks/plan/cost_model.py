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
FEWEST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Correction:
    """Whole steps against the sum of their kernels: measured = offset_s + scale * sum."""

    offset_s: float = 0.0
    scale: float = 1.0
    points: int = 0
    held_out: Errors | None = None
    """Each measured point predicted from all others."""
    layout_held_out: Errors | None = None
    """Every layout but TP1 predicted from TP1 alone."""

    def apply(self, seconds: float) -> float:
        """The corrected time."""
        return self.offset_s + self.scale * seconds


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
        parts = work.decode_step(self.shape, layout, batch, context)
        return self.decode_correction.apply(self.efficiencies.seconds(parts))

    def prefill_s(self, layout: Layout, tokens: int, before: int = 0) -> float:
        """``tokens`` of a prompt alone on the worker, in chunks, after ``before`` cached ones."""
        seconds, done = 0.0, before
        end = before + tokens
        while done < end:
            chunk = min(CHUNK_TOKENS, end - done)
            seconds += self._chunk_s(layout, chunk, done)
            done += chunk
        return self.prefill_correction.apply(seconds)

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

    def _chunk_s(self, layout: Layout, tokens: int, before: int) -> float:
        return min(self.efficiencies.seconds(parts) for parts in self._roads(layout, tokens, before))

    def _roads(self, layout: Layout, tokens: int, before: int) -> list[dict[KernelClass, floors.Work]]:
        """FP8 experts (widened layer by layer where they do not fit), and 4-bit ones for short chunks."""
        fp8 = work.prefill_chunk(
            self.shape, layout, tokens, before, form="fp8", widen=not self.holds_fp8(layout)
        )
        streamed = work.prefill_chunk(self.shape, layout, tokens, before, form="mxfp4", widen=False)
        streamed[KernelClass.MOE_DECODE] = streamed.pop(KernelClass.MOE_PREFILL)
        return [fp8, streamed]


def build(model: str, measured: Sequence[Record], gpu: Gpu = H200) -> CostModel:
    """The cost model of ``model``, calibrated on every figure of this GPU.

    Raises:
        ConfigError: no such model.
    """
    shape = preset(model)
    efficiencies = calibrate(measured, gpu)
    ours = [each for each in measured if gpu.name in each.device and each.model in PRESETS]
    decode = _correction(ours, records.BENCH_DECODE, efficiencies, _decode_sum)
    prefill = _correction(ours, records.BENCH_PREFILL, efficiencies, _prefill_sum)
    points = frozenset(
        (each.bench, each.layout, each.batch or 0, each.context or 0)
        if each.bench == records.BENCH_DECODE
        else (each.bench, each.layout, each.input_tokens or 0, 0)
        for each in ours
        if each.model == model and each.peer is None and each.bench != records.BENCH_KERNEL
    )
    return CostModel(model, shape, efficiencies, decode, prefill, points)


Sum = Callable[[CostModel, Record], float]


def _decode_sum(model: CostModel, record: Record) -> float:
    return model.decode_step_s(Layout.parse(record.layout), record.batch or 1, record.context or 1)


def _prefill_sum(model: CostModel, record: Record) -> float:
    """Prompt in to first token out: all tokens but the last, then a decode step."""
    layout, tokens = Layout.parse(record.layout), record.input_tokens or 1
    return model.prefill_s(layout, max(1, tokens - 1)) + model.decode_step_s(layout, 1, tokens)


def _correction(measured: Sequence[Record], bench: str, efficiencies: Efficiencies, total: Sum) -> Correction:
    """Fit whole steps of all models and layouts; none when there are too few."""
    rows: list[Row] = []
    first: list[Row] = []
    others: list[Row] = []
    for record in _fastest(records.select(measured, bench)):
        raw = total(CostModel(record.model, preset(record.model), efficiencies), record)
        row = ((1.0, raw), record.value * 1e-3)
        rows.append(row)
        (first if record.layout == "TP1" else others).append(row)
    if len(rows) < FEWEST_STEPS:
        return Correction()
    offset, scale = non_negative_fit(rows)
    return Correction(offset, scale, len(rows), leave_one_out(rows), _across(first, others))


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
    offset, scale = non_negative_fit(first)
    return Errors.of([(offset + scale * raw[1], value) for raw, value in others])
