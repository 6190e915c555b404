"""Lowest possible times on one H200: operations over rated FLOPS, or bytes over rated bandwidth if more.

Everything follows from the model's shape. Experts that a step reads are those that uniform, independent
routing would touch: E (1 - (1 - k / E)^B).
"""

from __future__ import annotations

from antiphon.model.config import GptOssConfig

BYTES_PER_S = 4.8e12
BF16_FLOPS = 990e12
FP8_FLOPS = 1979e12
MXFP4_BITS = 4.25
"""Bits of a weight with its share of the block scale."""
FP8_BITS = 8.0
_BF16_BYTES = 2


def expected_experts(config: GptOssConfig, tokens: int) -> float:
    """Distinct experts that ``tokens`` tokens touch in a layer, expected under uniform routing."""
    missed = (1.0 - config.experts_per_token / config.num_experts) ** tokens
    return config.num_experts * (1.0 - missed)


def decode_floor_ms(config: GptOssConfig, batch: int, context: int, expert_bits: float = MXFP4_BITS) -> float:
    """A decode step: every weight that is needed read once, and every sequence's visible keys and values."""
    layers = config.num_hidden_layers
    weights = (
        layers * expected_experts(config, batch) * _expert_weights(config) * expert_bits / 8
        + layers * _dense_weights(config) * _BF16_BYTES
        + _unembedding_weights(config) * _BF16_BYTES
    )
    visible = len(config.full_layers) * context + len(config.sliding_layers) * min(
        context, config.sliding_window
    )
    kv = batch * visible * 2 * config.kv_width * _BF16_BYTES
    return (weights + kv) / BYTES_PER_S * 1e3


def prefill_floor_ms(config: GptOssConfig, tokens: int, expert_bits: float) -> float:
    """A prompt of ``tokens``: FP8 experts and bf16 for the rest, or the read of every weight."""
    layers = config.num_hidden_layers
    experts = 2 * tokens * config.experts_per_token * _expert_weights(config) * layers / FP8_FLOPS
    dense = 2 * tokens * (_dense_weights(config) - _router_weights(config)) * layers / BF16_FLOPS
    window = min(tokens, config.sliding_window)
    pairs = len(config.full_layers) * tokens**2 / 2 + len(config.sliding_layers) * tokens * window
    attention = 2 * 2 * pairs * config.query_width / BF16_FLOPS
    read = (
        layers * config.num_experts * _expert_weights(config) * expert_bits / 8
        + (layers * _dense_weights(config) + _unembedding_weights(config)) * _BF16_BYTES
    ) / BYTES_PER_S
    return max(experts + dense + attention, read) * 1e3


def _expert_weights(config: GptOssConfig) -> int:
    """Weights of one expert: gate and up, and down."""
    return 3 * config.hidden_size * config.intermediate_size


def _router_weights(config: GptOssConfig) -> int:
    return config.hidden_size * config.num_experts


def _dense_weights(config: GptOssConfig) -> int:
    """Weights of one layer that every token uses."""
    projections = config.hidden_size * (2 * config.query_width + 2 * config.kv_width)
    return projections + _router_weights(config)


def _unembedding_weights(config: GptOssConfig) -> int:
    return config.hidden_size * config.vocab_size
