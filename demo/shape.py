"""The shape of the demo model."""

from __future__ import annotations

from antiphon.model.config import GptOssConfig

MODEL_NAME = "gpt-oss-tiny"

TINY = GptOssConfig(
    num_hidden_layers=8,
    num_experts=8,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
"""Constants as in the published models; every part splits evenly over up to four ranks."""
