"""How far each kernel class is from its floor: laws, measured where there are figures and assumed elsewhere.

A class's time on one GPU is ``launches * launch_s + memory * bytes / rated + compute * flop / rated``: the
sum and not the larger of the two, since the parts of one kernel overlap only in part. The three coefficients
are fitted to measured kernels; a class without measurements keeps assumed ones, and says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from antiphon.benchmarks import floors, records
from antiphon.benchmarks.floors import Work
from antiphon.benchmarks.plan.fit import Errors, Row, non_negative_fit
from antiphon.benchmarks.plan.hardware import H200, Gpu
from antiphon.benchmarks.plan.work import LINKS, KernelClass
from antiphon.benchmarks.records import Layout, Record
from antiphon.model.config import PRESETS, GptOssConfig, preset

FEWEST_POINTS = 3
"""Below this a class keeps its assumed law."""


@dataclass(frozen=True, slots=True)
class Law:
    """Time of one kernel class from its work."""

    launch_s: float
    memory: float = 1.0
    """Times the time that the bytes take at the rated bandwidth."""
    compute: float = 1.0
    """Times the time that the operations take at the rated speed."""
    points: int = 0
    """Measured points it was fitted to; 0 is assumed."""
    held_out: Errors | None = None

    @property
    def measured(self) -> bool:
        """Whether it rests on measurements."""
        return self.points > 0

    def split_s(self, work: Work, gpu: Gpu, link: bool = False) -> tuple[float, float]:
        """(seconds of the launches, of bytes and operations); ``link``: its bytes go over NVLink."""
        launches, memory, compute = _terms(work, gpu, link)
        return launches * self.launch_s, memory * self.memory + compute * self.compute

    def seconds(self, work: Work, gpu: Gpu, link: bool = False) -> float:
        """Time of ``work``."""
        return sum(self.split_s(work, gpu, link))


ASSUMED: Mapping[KernelClass, Law] = MappingProxyType(
    {
        KernelClass.DENSE_DECODE: Law(2.5e-6, 1.15, 1.5),
        KernelClass.ATTENTION_DECODE: Law(6e-6, 1.06),
        KernelClass.MOE_DECODE: Law(9e-6, 1.2, 2.0),
        KernelClass.ROUTE_DECODE: Law(5e-6, 1.0, 100.0),
        KernelClass.UNEMBEDDING: Law(10e-6, 1.1, 1.3),
        KernelClass.DENSE_CUBLAS: Law(6e-6, 1.15, 1.5),
        KernelClass.DENSE_PREFILL: Law(3e-6, 1.0, 1.25),
        KernelClass.ATTENTION_PREFILL: Law(5e-6, 1.0, 2.2),
        KernelClass.WINDOW_PREFILL: Law(5e-6, 4.0),
        KernelClass.MOE_PREFILL: Law(30e-6, 1.2, 1.7),
        KernelClass.MOE_MIXED: Law(30e-6, 1.2, 2.4),
        KernelClass.ELEMENTWISE: Law(3e-6, 1.3),
        KernelClass.SMALL_DECODE: Law(3e-6, 1.3),
        KernelClass.ALL_REDUCE_SMALL: Law(7e-6, 1.5),
        KernelClass.ALL_REDUCE_LARGE: Law(12e-6, 1.4),
        KernelClass.STEP: Law(100e-6, 1.3),
        KernelClass.CHOOSING: Law(2.5e-6, 1.3),
        KernelClass.CHUNK: Law(12e-6),
    }
)
"""Round figures of what such kernels reach elsewhere; every result that rests on one is marked predicted."""


BY_NAME: Mapping[str, KernelClass] = MappingProxyType(
    {
        "decode full": KernelClass.ATTENTION_DECODE,
        "decode sliding": KernelClass.ATTENTION_DECODE,
        "prefill full": KernelClass.ATTENTION_PREFILL,
        "attention full": KernelClass.ATTENTION_PREFILL,
        "norm+qkv+rope+write": KernelClass.DENSE_DECODE,
        "o+bias+residual": KernelClass.DENSE_DECODE,
        "logits": KernelClass.UNEMBEDDING,
    }
)
"""Beginnings of kernel names whose floor is all bytes (attention of prefill: all operations)."""
WINDOW_KERNELS = ("prefill sliding", "attention sliding")
SUPERSEDED: Mapping[str, str] = MappingProxyType(
    {"prefill full": "attention full", "prefill sliding": "attention sliding"}
)
"""Kernels that count only until the one that took their place has been measured."""
SUMS_BENCH, SUMS_TAKEN = "all_reduce", "peer memory, one launch"
"""Sums over ranks with the residual and the norm behind them, and which of their kinds counts."""
STEP_ROWS = 128
"""Up to here a sum's rows are those of a decode step."""
CONSTANT_WITHIN = 1.5
"""A term whose largest value is at most so many times its smallest cannot be told from a launch's cost."""


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """A law for every kernel class."""

    gpu: Gpu = H200
    laws: Mapping[KernelClass, Law] = field(default_factory=lambda: ASSUMED)

    def seconds(self, parts: Mapping[KernelClass, Work]) -> float:
        """Time of all parts, one after the other."""
        return sum(self.part_seconds(kind, work) for kind, work in parts.items())

    def part_seconds(self, kind: KernelClass, work: Work) -> float:
        """Time of one part."""
        return self.laws[kind].seconds(work, self.gpu, kind in LINKS)

    def split_s(self, kind: KernelClass, work: Work) -> tuple[float, float]:
        """(seconds of a part's launches, of its bytes and operations)."""
        return self.laws[kind].split_s(work, self.gpu, kind in LINKS)

    def assumed(self, parts: Mapping[KernelClass, Work]) -> list[KernelClass]:
        """Those of the parts whose law no measurement supports."""
        return [kind for kind in parts if not self.laws[kind].measured]


def calibrate(measured: Sequence[Record], gpu: Gpu = H200) -> Efficiencies:
    """Fit the laws of all classes that have at least three measured points on this GPU."""
    laws = dict(ASSUMED)
    for kind, rows in kernel_points(measured, gpu).items():
        if len(rows) >= FEWEST_POINTS:
            laws[kind] = _fitted(rows, ASSUMED[kind])
    return Efficiencies(gpu, MappingProxyType(laws))


def kernel_points(measured: Sequence[Record], gpu: Gpu) -> dict[KernelClass, list[Row]]:
    """(terms, seconds) of every measured kernel that belongs to a class; of one point the fastest variant."""
    best: dict[tuple[object, ...], tuple[KernelClass, Work, float]] = {}
    kernels = [
        each
        for bench in (records.BENCH_KERNEL, SUMS_BENCH)
        for each in records.select(measured, bench)
        if gpu.name in each.device
    ]
    names = {each.kernel or "" for each in kernels}
    gone = tuple(old for old, new in SUPERSEDED.items() if any(name.startswith(new) for name in names))
    for record in kernels:
        if record.extra.get("ok") is False or (record.kernel or "").startswith(gone):
            continue
        for kind, work, seconds in _readings(record, gpu):
            key = (kind, record.model, *_variant_of(record), record.batch, record.context)
            if key not in best or seconds < best[key][2]:
                best[key] = (kind, work, seconds)
    grouped: defaultdict[KernelClass, list[Row]] = defaultdict(list)
    for kind, work, seconds in best.values():
        grouped[kind].append((_terms(work, gpu, kind in LINKS), seconds))
    return dict(grouped)


def _readings(record: Record, gpu: Gpu) -> list[tuple[KernelClass, Work, float]]:
    """What one kernel record says about classes: (class, work of one launch, seconds)."""
    kernel, shape = record.kernel or "", PRESETS.get(record.model)
    value_s = record.value * 1e-6
    if record.bench == SUMS_BENCH:
        return _sum_over_ranks(record)
    parts = record.extra.get("parts")
    times = {str(k): float(v) * 1e-6 for k, v in parts.items()} if isinstance(parts, dict) else {}
    for name, kind in BY_NAME.items():
        if kernel.startswith(name) and record.floor is not None:
            return [(kind, _work_of_floor(kind, record.floor * 1e-6, gpu), value_s)]
    if kernel.startswith(WINDOW_KERNELS):
        work = Work(_prompt_tokens(record) * floors.window_attention_bytes(preset("gpt-oss-20b")), launches=1)
        return [(KernelClass.WINDOW_PREFILL, work, value_s)]
    if shape is None:
        return []
    if kernel.startswith("moe_streamed") and record.batch:
        flop = 2.0 * record.batch * shape.experts_per_token * floors.expert_values(shape)
        expected = floors.expected_experts(shape, record.batch) * floors.expert_bytes(shape, "mxfp4")
        read = expected if record.floor is None else record.floor * 1e-6 * gpu.bytes_per_s
        found = [(KernelClass.MOE_DECODE, Work(read, flop, launches=1), times.get("experts", value_s))]
        if "route" in times:
            found.append((KernelClass.ROUTE_DECODE, _route(record.batch, shape), times["route"]))
        return found
    if kernel == "moe route" and record.batch:
        return [(KernelClass.ROUTE_DECODE, _route(record.batch, shape), value_s)]
    if kernel.startswith(("moe_fp8", "moe mixed")) and record.input_tokens:
        tokens, mixed = record.input_tokens, kernel.startswith("moe mixed")
        flop = 2.0 * tokens * shape.experts_per_token * floors.expert_values(shape)
        held = floors.expert_bytes(shape, "mxfp4" if mixed else "fp8")
        work = Work(floors.expected_experts(shape, tokens) * held, fp8_flop=flop, launches=1)
        kind = KernelClass.MOE_MIXED if mixed else KernelClass.MOE_PREFILL
        return [(kind, work, times.get("experts", value_s))]
    return []


def _sum_over_ranks(record: Record) -> list[tuple[KernelClass, Work, float]]:
    """Of the sum that ranks take; both models are as wide."""
    rows, ranks = record.batch or 0, Layout.parse(record.layout).tp
    if record.kernel != SUMS_TAKEN or not rows:
        return []
    kind = KernelClass.ALL_REDUCE_SMALL if rows <= STEP_ROWS else KernelClass.ALL_REDUCE_LARGE
    sent = floors.all_reduce_bytes(preset("gpt-oss-20b"), rows, ranks)
    return [(kind, Work(sent, launches=1), record.value * 1e-6)]


def _variant_of(record: Record) -> tuple[object, ...]:
    """What tells points of a class apart; of kernels and settings for one point the fastest counts."""
    kernel, shape = record.kernel or "", str(record.extra.get("shape", ""))
    if kernel.startswith((*WINDOW_KERNELS, "prefill full", "attention full")):
        tokens = _prompt_tokens(record)
        found = re.search(r"ctx=(\d+)", shape)
        return tokens, int(found[1]) if found else tokens
    return kernel.removesuffix(" pdl"), shape.partition(" s=")[0], record.input_tokens


def _prompt_tokens(record: Record) -> int:
    """Tokens of a prompt's chunk: the record's, or those in its text of the shape."""
    found = re.match(r"T=(\d+)", str(record.extra.get("shape", "")))
    return record.input_tokens or (int(found[1]) if found else 1)


def _work_of_floor(kind: KernelClass, floor_s: float, gpu: Gpu) -> Work:
    """What a kernel does whose record gives its floor and not its shape."""
    if kind is KernelClass.ATTENTION_PREFILL:
        return Work(bf16_flop=floor_s * gpu.bf16_flops, launches=1)
    return Work(bytes=floor_s * gpu.bytes_per_s, launches=1)


def _route(batch: int, shape: GptOssConfig) -> Work:
    return Work(bf16_flop=2.0 * batch * shape.num_experts * shape.hidden_size, launches=1)


def _terms(work: Work, gpu: Gpu, link: bool) -> tuple[float, float, float]:
    """(launches, seconds of bytes, seconds of operations) at the rated speeds."""
    rate = gpu.nvlink_bytes_per_s if link else gpu.bytes_per_s
    compute = work.bf16_flop / gpu.bf16_flops + work.fp8_flop / gpu.fp8_flops
    return work.launches, work.bytes / rate, compute


def _fitted(rows: Sequence[Row], assumed: Law) -> Law:
    """The law of measured points.

    The fit knows nothing of a term that is 0 in every point, and cannot tell terms apart that hardly vary: of
    those the assumed coefficients stay, the launch's first.
    """
    varying = [_varies([terms[index] for terms, _ in rows]) for index in range(3)]
    seen = [any(terms[index] > 0 for terms, _ in rows) for index in range(3)]
    free = [seen[index] and (index > 0 or any(varying[1:])) for index in range(3)]
    kept = (assumed.launch_s, assumed.memory, assumed.compute)

    def fixed_s(terms: Sequence[float]) -> float:
        return sum(0.0 if free[index] else kept[index] * terms[index] for index in range(3))

    # Where the assumed part alone exceeds a point, there is nothing left to fit: the launch is fitted too.
    if any(fixed_s(terms) >= value for terms, value in rows):
        free = seen
    reduced: list[Row] = [
        (tuple(terms[index] for index in range(3) if free[index]), value - fixed_s(terms))
        for terms, value in rows
    ]
    found = iter(non_negative_fit(reduced))
    launch_s, memory, compute = (next(found) if free[index] else kept[index] for index in range(3))
    return Law(launch_s, memory, compute, len(rows), _held_out(rows, reduced))


def _held_out(rows: Sequence[Row], reduced: Sequence[Row]) -> Errors | None:
    """Each point predicted from the others; the assumed part counts as predicted."""
    if len(rows) < FEWEST_POINTS:
        return None
    pairs = []
    for index, ((terms, left), (_, value)) in enumerate(zip(reduced, rows, strict=True)):
        coefficients = non_negative_fit([*reduced[:index], *reduced[index + 1 :]])
        known = value - left
        pairs.append((known + sum(c * t for c, t in zip(coefficients, terms, strict=True)), value))
    return Errors.of(pairs)


def _varies(values: Sequence[float]) -> bool:
    return min(values) >= 0 and max(values) > CONSTANT_WITHIN * min(values)
