"""The least work of a GPT-OSS model, and the times that it takes at a GPU's rated speeds.

Bytes that must move and operations that must be done follow from the published shape; nothing is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from antiphon.benchmarks.plan.hardware import H200, Gpu
from antiphon.benchmarks.records import Layout
from antiphon.model.config import GptOssConfig

BF16_BYTES = 2
MXFP4_BYTES = 17 / 32
"""Of one weight: 4 bits and a share of the block's scale byte."""
FP8_BYTES = 1.0
"""Of one weight; the float32 scale of a 128 x 128 tile is 0.02 % more and not counted."""
WEIGHT_BYTES = {"mxfp4": MXFP4_BYTES, "fp8": FP8_BYTES, "bf16": float(BF16_BYTES)}
Form = Literal["mxfp4", "fp8", "bf16"]
"""How experts are held."""

PAD = 128
"""Rows to which a rank's share of an expert is padded when experts are split instead of spread."""

LARGEST_OF_NORMALS = {1: 0.0, 2: 0.5642, 4: 1.0294, 8: 1.4236}
"""Expected largest of n independent standard normals."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel class does on one GPU; a rate turns it into a time."""

    bytes: float = 0.0
    bf16_flop: float = 0.0
    fp8_flop: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.bytes + other.bytes,
            self.bf16_flop + other.bf16_flop,
            self.fp8_flop + other.fp8_flop,
            self.launches + other.launches,
        )


def attention_weight_bytes(shape: GptOssConfig) -> float:
    """QKV and output projections with their biases, the router and the norms of one layer, in bf16."""
    qkv_rows = shape.query_width + 2 * shape.kv_width
    values = (
        qkv_rows * (shape.hidden_size + 1)
        + shape.hidden_size * (shape.query_width + 1)
        + shape.num_experts * (shape.hidden_size + 1)
        + 2 * shape.hidden_size
        + shape.num_attention_heads
    )
    return values * BF16_BYTES


def unembedding_bytes(shape: GptOssConfig) -> float:
    """The vocabulary's rows in bf16 (the embedding has as many)."""
    return shape.vocab_size * shape.hidden_size * BF16_BYTES


def expert_values(shape: GptOssConfig) -> int:
    """Weights of one expert, biases left out."""
    return 3 * shape.hidden_size * shape.intermediate_size


def expert_bytes(shape: GptOssConfig, form: Form) -> float:
    """One expert's weights and bf16 biases."""
    bias = (2 * shape.intermediate_size + shape.hidden_size) * BF16_BYTES
    return expert_values(shape) * WEIGHT_BYTES[form] + bias


def kv_bytes_per_token_layer(shape: GptOssConfig, kv_value_bytes: int = BF16_BYTES) -> float:
    """K and V of one token in one layer."""
    return 2 * shape.kv_width * kv_value_bytes


def fp8_kv_bytes_per_token_layer(shape: GptOssConfig) -> float:
    """K and V of one token in one layer of FP8 pages: a byte a number, two for each head's scale."""
    return 2 * shape.num_key_value_heads * (shape.head_dim + 2)


def kv_bytes(
    shape: GptOssConfig, context: float, kv_value_bytes: int = BF16_BYTES, *, full_fp8: bool = False
) -> float:
    """KV of one sequence: every token in full layers, maybe in FP8 there, and the window in sliding ones."""
    per_layer = kv_bytes_per_token_layer(shape, kv_value_bytes)
    full = fp8_kv_bytes_per_token_layer(shape) if full_fp8 else per_layer
    window = min(context, float(shape.sliding_window))
    return full * len(shape.full_layers) * context + per_layer * len(shape.sliding_layers) * window


def expected_experts(shape: GptOssConfig, tokens: float) -> float:
    """Expected experts of a layer that any of ``tokens`` is routed to, independent uniform routing.

    Real routing is more concentrated, so this is an upper estimate.
    """
    experts = shape.num_experts
    missed: float = (1 - shape.experts_per_token / experts) ** tokens
    return experts * (1 - missed)


def busiest_rank_experts(shape: GptOssConfig, tokens: float, ranks: int) -> float:
    """Expected distinct experts on the rank that has most of them, experts spread over ``ranks``.

    Ranks are taken as independent binomials in the normal approximation; never more than a rank holds.
    """
    held = shape.num_experts / ranks
    share = expected_experts(shape, tokens) / shape.num_experts
    spread = math.sqrt(held * share * (1 - share))
    return min(held, held * share + LARGEST_OF_NORMALS[ranks] * spread)


def padded_share(shape: GptOssConfig, ranks: int) -> float:
    """Share of an expert's rows that one of ``ranks`` computes when each expert is split."""
    if ranks == 1:
        return 1.0
    rows = math.ceil(shape.intermediate_size / ranks / PAD) * PAD
    return rows / shape.intermediate_size


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Weights on one GPU."""

    experts: float
    attention: float
    vocabulary: float

    @property
    def total(self) -> float:
        """Bytes on one GPU."""
        return self.experts + self.attention + self.vocabulary


def weights_on_one_gpu(
    shape: GptOssConfig, layout: Layout, form: Form, *, with_unembedding: bool
) -> WeightBytes:
    """Weights that one rank holds: heads, experts and vocabulary are all split over the ranks."""
    tables = 2 if with_unembedding else 1
    experts = shape.num_hidden_layers * shape.num_experts * expert_bytes(shape, form)
    share = 1 / layout.tp if layout.ep > 1 else padded_share(shape, layout.tp)
    return WeightBytes(
        experts=experts * share,
        attention=shape.num_hidden_layers * attention_weight_bytes(shape) / layout.tp,
        vocabulary=tables * unembedding_bytes(shape) / layout.tp,
    )


def all_reduce_bytes(shape: GptOssConfig, tokens: float, ranks: int) -> float:
    """Bytes that one GPU sends in a ring all-reduce of [T, hidden] bf16."""
    return 2 * (ranks - 1) / ranks * tokens * shape.hidden_size * BF16_BYTES


def dense_values(shape: GptOssConfig) -> int:
    """Weights of one layer's QKV and output projections."""
    qkv = shape.hidden_size * (shape.query_width + 2 * shape.kv_width)
    return qkv + shape.query_width * shape.hidden_size


def full_attention_flop(shape: GptOssConfig, tokens: int, before: int = 0) -> float:
    """QK and PV of the layers that see everything, for ``tokens`` after ``before``, causal."""
    pairs = tokens * before + tokens * tokens / 2
    return 4 * shape.query_width * len(shape.full_layers) * pairs


def window_attention_flop(shape: GptOssConfig, tokens: int) -> float:
    """QK and PV of the layers that see a window."""
    pairs = tokens * float(min(tokens, shape.sliding_window))
    return 4 * shape.query_width * len(shape.sliding_layers) * pairs


def window_attention_bytes(shape: GptOssConfig) -> float:
    """Queries read and outputs written for a token in one window layer, bf16: longer than its operations."""
    return 2 * shape.query_width * BF16_BYTES


def decode_floor_ms(
    shape: GptOssConfig,
    batch: int,
    context: int,
    form: Form = "mxfp4",
    gpu: Gpu = H200,
    *,
    full_fp8: bool = False,
) -> float:
    """A decode step on one GPU: every weight that is needed read once, and all visible keys and values.

    ``full_fp8``: those of full layers lie in FP8 pages.

    Experts that a step reads are those that uniform, independent routing would touch.
    """
    layers = shape.num_hidden_layers
    weights = (
        layers * expected_experts(shape, batch) * expert_bytes(shape, form)
        + layers * attention_weight_bytes(shape)
        + unembedding_bytes(shape)
    )
    return (weights + batch * kv_bytes(shape, context, full_fp8=full_fp8)) / gpu.bytes_per_s * 1e3


def prefill_floor_ms(shape: GptOssConfig, tokens: int, form: Form, gpu: Gpu = H200) -> float:
    """A prompt on one GPU: FP8 operations of the experts, bf16 ones of the rest; or the read of all weights.

    ``form`` is how the experts are held; 4-bit ones are widened to FP8 for the product.
    """
    layers = shape.num_hidden_layers
    experts = 2.0 * tokens * shape.experts_per_token * expert_values(shape) * layers / gpu.fp8_flops
    dense = 2.0 * tokens * dense_values(shape) * layers / gpu.bf16_flops
    attention = (full_attention_flop(shape, tokens) + window_attention_flop(shape, tokens)) / gpu.bf16_flops
    weights = layers * (shape.num_experts * expert_bytes(shape, form) + attention_weight_bytes(shape))
    read = (weights + unembedding_bytes(shape)) / gpu.bytes_per_s
    return max(experts + dense + attention, read) * 1e3
