"""Latency and memory of a layout: floors times efficiencies, corrected by whole steps that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from antiphon.benchmarks import floors, records
from antiphon.benchmarks.plan import work
from antiphon.benchmarks.plan.efficiency import Efficiencies, calibrate
from antiphon.benchmarks.plan.fit import Errors, Row, leave_one_out, non_negative_fit
from antiphon.benchmarks.plan.hardware import H200, Gpu
from antiphon.benchmarks.plan.work import PAGE_TOKENS, KernelClass
from antiphon.benchmarks.records import Layout, Record
from antiphon.model.config import PRESETS, GptOssConfig, preset

RESERVED_BYTES = 8e9
"""Assumed: CUDA context, graphs, workspaces and communication buffers of one GPU."""
WINDOW_PAGES = 3
"""Pages that a window of 128 tokens can touch."""
CHUNK_TOKENS = 8192
FEWEST_STEPS = 6
"""Below this nothing is corrected. A factor that the points hardly tell anything about stays near 1."""
TOWARDS_ONE = 0.05
"""Pull of a factor to 1, against the squared relative errors of whole steps: see ``non_negative_fit``."""
SMALLER, LARGER = "gpt-oss-20b", "gpt-oss-120b"


class Group(IntEnum):
    """What of a step or a prompt has a factor of its own."""

    ATTENTION = 0
    EXPERTS = 1
    FP8_EXPERTS = 2
    """Prefill: those that were told to be resident."""
    DENSE = 3
    """Projections and logits."""
    SMALL = 4
    """Prefill: norms and such, and planning. Decode: the step itself, norms and such."""
    LAUNCHES = 5
    """Of kernels that wait for the end of those before them."""
    FUSED = 6
    """Launches of kernels that begin before those ahead are over, and projections that read meanwhile."""
    RANKS = 7
    """Sums over ranks, and choosing tokens over them."""


Groups = tuple[float, ...]
"""Seconds, or factors, of each ``Group``."""
NOTHING: Groups = (0.0,) * len(Group)
GROUP_OF = {
    KernelClass.ATTENTION_DECODE: Group.ATTENTION,
    KernelClass.ATTENTION_PREFILL: Group.ATTENTION,
    KernelClass.WINDOW_PREFILL: Group.ATTENTION,
    KernelClass.MOE_DECODE: Group.EXPERTS,
    KernelClass.ROUTE_DECODE: Group.EXPERTS,
    KernelClass.MOE_PREFILL: Group.FP8_EXPERTS,
    KernelClass.MOE_MIXED: Group.EXPERTS,
    KernelClass.DENSE_DECODE: Group.FUSED,
    KernelClass.DENSE_CUBLAS: Group.DENSE,
    KernelClass.DENSE_PREFILL: Group.DENSE,
    KernelClass.UNEMBEDDING: Group.DENSE,
    KernelClass.ALL_REDUCE_SMALL: Group.RANKS,
    KernelClass.ALL_REDUCE_LARGE: Group.RANKS,
    KernelClass.CHOOSING: Group.RANKS,
}
WHOLE = frozenset({KernelClass.STEP, KernelClass.CHUNK}) | {
    kind for kind, group in GROUP_OF.items() if group is Group.RANKS
}
"""Classes whose launches are not told from the rest of them."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Whole steps against the sum of their kernels: each group of classes has a factor of its own."""

    factors: Groups = (1.0,) * len(Group)
    points: int = 0
    held_out: Errors | None = None
    """Each measured point predicted from all others."""
    layout_points: int = 0
    layout_held_out: Errors | None = None
    """Every layout of several ranks predicted from TP1 alone."""
    model_points: int = 0
    model_held_out: Errors | None = None
    """``LARGER`` predicted from ``SMALLER`` alone."""

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
        """Uncorrected seconds of a step by group."""
        parts = work.decode_step(self.shape, layout, batch, context)
        return self._grouped(parts, Group.FUSED if work.is_fused(layout, batch) else Group.LAUNCHES)

    def prefill_s(self, layout: Layout, tokens: int, before: int = 0) -> float:
        """``tokens`` of a prompt alone on the worker, in chunks, after ``before`` cached ones."""
        return self.prefill_correction.apply(self.prefill_groups_s(layout, tokens, before))

    def prefill_groups_s(
        self, layout: Layout, tokens: int, before: int = 0, *, resident_fp8: bool = False
    ) -> Groups:
        """Uncorrected seconds of a prompt's chunks by group; workers hold no FP8 experts unless told to."""
        total, done, end = NOTHING, before, before + tokens
        while done < end:
            chunk = min(CHUNK_TOKENS, end - done)
            road = work.chunk_road(self.shape, layout, chunk, resident_fp8)
            parts = work.prefill_chunk(self.shape, layout, chunk, done, road=road)
            total = _plus(total, self._grouped(parts, Group.LAUNCHES))
            done += chunk
        return total

    def _grouped(self, parts: work.Parts, launches: Group) -> Groups:
        seconds = [0.0] * len(Group)
        for kind, each in parts.items():
            launching_s, rest_s = self.efficiencies.split_s(kind, each)
            group = GROUP_OF.get(kind, Group.SMALL)
            seconds[group] += rest_s
            seconds[group if kind in WHOLE else launches] += launching_s
        return tuple(seconds)

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
        prefill = work.prefill_chunk(self.shape, layout, CHUNK_TOKENS, 0, road="mixed")
        found = {"decode": self.efficiencies.assumed(decode), "prefill": self.efficiencies.assumed(prefill)}
        # A correction fitted to whole steps stands for the classes inside them, but not for more ranks.
        for role, whole in (("decode", self.decode_correction), ("prefill", self.prefill_correction)):
            if whole.points:
                found[role] = [each for each in found[role] if GROUP_OF.get(each) is Group.RANKS]
        return found


def build(model: str, measured: Sequence[Record], gpu: Gpu = H200) -> CostModel:
    """The cost model of ``model``, calibrated on every figure of this GPU that a worker reaches unasked.

    Raises:
        ConfigError: no such model.
    """
    shape = preset(model)
    efficiencies = calibrate(measured, gpu)
    ours = [
        each for each in measured if gpu.name in each.device and each.model in PRESETS and not each.choices
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
    groups = model.prefill_groups_s(layout, max(1, tokens - 1), resident_fp8=record.holds_fp8)
    return groups, model.decode_step_s(layout, 1, tokens)


def _correction(
    measured: Sequence[Record], bench: str, plain: Callable[[str], CostModel], groups_of: GroupsOf
) -> Correction:
    """Fit whole steps of all models and layouts; none when there are too few."""
    rows: list[Row] = []
    by_layout: tuple[list[Row], list[Row]] = [], []  # TP1, those of several ranks
    by_model: tuple[list[Row], list[Row]] = [], []
    for record in _fastest(records.select(measured, bench)):
        layout = Layout.parse(record.layout)
        if layout.dp > 1:
            continue  # the slowest of replicas, each as TP1 is
        groups, known_s = groups_of(plain(record.model), record)
        row = (groups, max(1e-9, record.value * 1e-3 - known_s))
        rows.append(row)
        by_layout[layout != Layout()].append(row)
        if record.model in (SMALLER, LARGER):
            by_model[record.model == LARGER].append(row)
    if len(rows) < FEWEST_STEPS:
        return Correction()
    factors = non_negative_fit(rows, TOWARDS_ONE)
    return Correction(
        *(factors, len(rows), leave_one_out(rows, TOWARDS_ONE)),
        *(len(by_layout[1]), _across(*by_layout)),
        *(len(by_model[1]), _across(*by_model)),
    )


def _fastest(found: Sequence[Record]) -> list[Record]:
    """One good record of each point: of several ways to hold the weights, the fastest."""
    best: dict[tuple[object, ...], Record] = {}
    for each in found:
        key = (each.model, each.layout, each.batch, each.input_tokens, each.context, each.holds_fp8)
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
    return tuple(a + b for a, b in zip(one, other, strict=True))
