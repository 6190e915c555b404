"""What a decode step and a prompt chunk do, split into kernel classes, for one GPU of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from antiphon.benchmarks import floors
from antiphon.benchmarks.floors import Form, Work
from antiphon.benchmarks.plan.hardware import H200, Gpu
from antiphon.benchmarks.records import Layout
from antiphon.kernels.moe.regime import most_streamed
from antiphon.model.config import GptOssConfig

FUSED_TOKENS = 16
"""A step of up to so many tokens on one GPU takes kernels that do the small work too, and overlap."""
PAGE_TOKENS = 64
PLANNED_PAGES = 48
"""Planning a chunk takes as long as planning so many of its pages, and each of them."""
CHOOSING_LAUNCHES, CHOOSING_BYTES = 60, 66
"""Choosing over ranks, in launches of torch's and bytes of each logit: see ``model.parallel.vocabulary``."""
CHOOSING_BYTES_ALONE = 12
"""On one GPU: each logit is written, and read twice."""


class KernelClass(StrEnum):
    """Kernels that share an efficiency."""

    DENSE_DECODE = "dense projections, decode"
    ATTENTION_DECODE = "attention, decode"
    MOE_DECODE = "experts, decode (MXFP4)"
    ROUTE_DECODE = "expert routing, decode"
    UNEMBEDDING = "logits"
    DENSE_CUBLAS = "dense projections, decode, by cuBLAS"
    DENSE_PREFILL = "dense projections, prefill"
    ATTENTION_PREFILL = "attention to everything, prefill"
    WINDOW_PREFILL = "attention to the window, prefill"
    MOE_PREFILL = "experts, prefill (FP8)"
    MOE_MIXED = "experts, prefill (FP8 by MXFP4)"
    ELEMENTWISE = "norms, rotary, activation"
    SMALL_DECODE = "norms and rotary, decode"
    CHUNK = "planning and launching a chunk"
    ALL_REDUCE_SMALL = "all-reduce, decode"
    ALL_REDUCE_LARGE = "all-reduce, prefill"
    STEP = "planning, sampling, launch of a step"
    CHOOSING = "choosing tokens over ranks"


LINKS = frozenset({KernelClass.ALL_REDUCE_SMALL, KernelClass.ALL_REDUCE_LARGE})
"""Classes whose bytes go over NVLink."""
ACTIVATIONS = frozenset({KernelClass.SMALL_DECODE, KernelClass.STEP, KernelClass.CHOOSING})
"""Classes of a decode step that read and write nothing else."""

Parts = Mapping[KernelClass, Work]


def decode_step(
    shape: GptOssConfig,
    layout: Layout,
    batch: float,
    context: float,
    form: Form = "mxfp4",
    kv_value_bytes: int = 2,
) -> dict[KernelClass, Work]:
    """One step of ``batch`` sequences that hold ``context`` tokens each.

    More than ``FUSED_TOKENS``, and steps over ranks, have cuBLAS's products and launches of their own between
    them; over ranks the norms belong to the sums.
    """
    tp, layers, fused = layout.tp, shape.num_hidden_layers, is_fused(layout, batch)
    dense = Work(
        bytes=layers * floors.attention_weight_bytes(shape) / tp,
        bf16_flop=layers * 2 * batch * floors.dense_values(shape) / tp,
        launches=2 * layers,
    )
    logits = batch * shape.vocab_size / tp
    parts = {
        KernelClass.DENSE_DECODE if fused else KernelClass.DENSE_CUBLAS: dense,
        KernelClass.ATTENTION_DECODE: Work(
            bytes=batch * floors.kv_bytes(shape, context, kv_value_bytes) / tp, launches=layers
        ),
        **_step_experts(shape, layout, batch, form),
        KernelClass.ROUTE_DECODE: Work(
            bf16_flop=layers * 2.0 * batch * shape.num_experts * shape.hidden_size, launches=layers
        ),
        KernelClass.UNEMBEDDING: Work(
            bytes=floors.unembedding_bytes(shape) / tp,
            bf16_flop=2 * logits * shape.hidden_size,
            launches=1,
        ),
        KernelClass.STEP: Work(bytes=logits * CHOOSING_BYTES_ALONE if tp == 1 else 0.0, launches=1),
    }
    if not fused:
        small = 2 if tp == 1 else 1
        moved = layers * batch * _elementwise_bytes(shape, tp)
        parts[KernelClass.SMALL_DECODE] = Work(bytes=moved, launches=small * layers)
    if tp > 1:
        sent = floors.all_reduce_bytes(shape, batch, tp)
        parts[KernelClass.ALL_REDUCE_SMALL] = Work(bytes=2 * layers * sent, launches=2 * layers)
        parts[KernelClass.CHOOSING] = Work(bytes=logits * CHOOSING_BYTES, launches=CHOOSING_LAUNCHES)
    return parts


def is_fused(layout: Layout, batch: float) -> bool:
    """Whether a step's launches are few and begin before those ahead of them are over."""
    return layout.tp == 1 and batch <= FUSED_TOKENS


Road = Literal["fp8", "mixed", "streamed"]
"""How experts are multiplied by: FP8 weights, 4-bit ones in FP8, or 4-bit ones as they are."""


def last_streamed(shape: GptOssConfig, layout: Layout, resident_fp8: bool = False) -> int:
    """Tokens of the largest chunk or step for which a worker's model streams 4-bit weights."""
    return most_streamed(shape.num_experts, layout.tp == 1 and not resident_fp8)


def chunk_road(shape: GptOssConfig, layout: Layout, tokens: int, resident_fp8: bool) -> Road:
    """The road that a worker's model takes for a chunk, or for its end, of ``tokens``."""
    if tokens <= last_streamed(shape, layout, resident_fp8):
        return "streamed"
    return "fp8" if resident_fp8 else "mixed"


_ROADS: dict[Road, tuple[KernelClass, Form]] = {
    "fp8": (KernelClass.MOE_PREFILL, "fp8"),
    "mixed": (KernelClass.MOE_MIXED, "mxfp4"),
    "streamed": (KernelClass.MOE_DECODE, "mxfp4"),
}


def prefill_chunk(
    shape: GptOssConfig,
    layout: Layout,
    tokens: int,
    before: int,
    *,
    road: Road,
    with_unembedding: bool = False,
) -> dict[KernelClass, Work]:
    """A chunk of ``tokens`` of one prompt whose first ``before`` tokens are done."""
    tp, layers, hidden = layout.tp, shape.num_hidden_layers, shape.hidden_size
    kind, form = _ROADS[road]
    # TP of experts pads a rank's rows; EP gives each rank whole experts, uniform routing assumed.
    share = 1 / tp if layout.ep > 1 else floors.padded_share(shape, tp)
    read = floors.expected_experts(shape, tokens) * floors.expert_bytes(shape, form) * share
    flop = layers * 2.0 * tokens * floors.expert_values(shape) * shape.experts_per_token * share
    streamed = road == "streamed"
    parts = {
        KernelClass.DENSE_PREFILL: Work(
            bytes=layers * floors.attention_weight_bytes(shape) / tp,
            bf16_flop=layers * 2.0 * tokens * (floors.dense_values(shape) + shape.num_experts * hidden) / tp,
            launches=3 * layers,
        ),
        KernelClass.ATTENTION_PREFILL: Work(
            bf16_flop=floors.full_attention_flop(shape, tokens, before) / tp,
            launches=len(shape.full_layers),
        ),
        KernelClass.WINDOW_PREFILL: Work(
            bytes=len(shape.sliding_layers) * tokens * floors.window_attention_bytes(shape) / tp,
            launches=len(shape.sliding_layers),
        ),
        kind: Work(
            bytes=layers * read,
            bf16_flop=flop if streamed else 0.0,
            fp8_flop=0.0 if streamed else flop,
            launches=layers,
        ),
        KernelClass.ELEMENTWISE: Work(
            bytes=layers * tokens * _elementwise_bytes(shape, tp), launches=4 * layers
        ),
        KernelClass.CHUNK: Work(launches=PLANNED_PAGES + tokens / PAGE_TOKENS),
    }
    if with_unembedding:
        parts[KernelClass.UNEMBEDDING] = Work(bytes=floors.unembedding_bytes(shape) / tp, launches=1)
    if tp > 1:
        sent = floors.all_reduce_bytes(shape, tokens, tp)
        parts[KernelClass.ALL_REDUCE_LARGE] = Work(bytes=2 * layers * sent, launches=2 * layers)
    return parts


def least_bytes(parts: Parts) -> float:
    """Of a decode step, from one GPU's memory: weights, keys and values; activations may stay on the chip."""
    return sum(part.bytes for kind, part in parts.items() if kind not in LINKS | ACTIVATIONS)


def layout_floor_s(
    shape: GptOssConfig,
    layout: Layout,
    input_tokens: int | None,
    batch: int | None,
    context: int | None,
    gpu: Gpu = H200,
) -> float:
    """Least time of a prompt (``input_tokens``) or a decode step on the GPUs of a layout.

    As ``floors.decode_floor_ms`` and ``prefill_floor_ms`` for one GPU, and what the sums over ranks send at
    the rated speed of the links on top.
    """
    if input_tokens is None:
        parts = decode_step(shape, layout, batch or 1, context or 1)
        least_s = least_bytes(parts) / gpu.bytes_per_s
    else:
        parts = prefill_chunk(shape, layout, input_tokens, 0, road="fp8")
        compute_s = sum(p.bf16_flop / gpu.bf16_flops + p.fp8_flop / gpu.fp8_flops for p in parts.values())
        compute_s += floors.window_attention_flop(shape, input_tokens) / layout.tp / gpu.bf16_flops
        weights = floors.weights_on_one_gpu(shape, layout, "mxfp4", with_unembedding=True).total
        least_s = max(compute_s, weights / gpu.bytes_per_s)
    return least_s + sum(parts[kind].bytes for kind in LINKS & parts.keys()) / gpu.nvlink_bytes_per_s


def _step_experts(shape: GptOssConfig, layout: Layout, batch: float, form: Form) -> Parts:
    """Experts of a decode step, on the road that it takes."""
    layers, each = shape.num_hidden_layers, floors.expert_bytes(shape, form)
    if layout.ep > 1:
        read = floors.busiest_rank_experts(shape, batch, layout.ep) * each
        share = 1 / layout.ep
    else:
        share = floors.padded_share(shape, layout.tp)
        read = floors.expected_experts(shape, batch) * each * share
    flop = layers * 2 * batch * shape.experts_per_token * floors.expert_values(shape) * share
    if batch <= last_streamed(shape, layout):
        return {KernelClass.MOE_DECODE: Work(bytes=layers * read, bf16_flop=flop, launches=layers)}
    return {KernelClass.MOE_MIXED: Work(bytes=layers * read, fp8_flop=flop, launches=layers)}


def _elementwise_bytes(shape: GptOssConfig, tp: int) -> float:
    """Activations of one token and layer that are written and read between the products, bf16 and fp8.

    Two norms over the hidden state, the residual twice, rotary and page write of QKV, and the quantised copy
    that the experts read; what is inside a product's epilogue is not counted.
    """
    qkv = (shape.query_width + 2 * shape.kv_width) / tp
    return shape.hidden_size * (8 * floors.BF16_BYTES + 2) + 2 * qkv * floors.BF16_BYTES
