"""Which shapes the kernels made for Hopper take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from antiphon.kernels.attention.prefill_hopper import hopper_prefill_attention
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import preset
from antiphon.model.cuda_roads import hopper_shape_obstacle


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_published_shapes_are_what_they_are_made_for(model: str) -> None:
    assert hopper_shape_obstacle(preset(model)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 2816),
        ("intermediate_size", 5760),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 16),
        ("head_dim", 128),
        ("experts_per_token", 2),
        ("swiglu_limit", 6.0),
        ("num_experts", 256),
        ("sliding_window", 32),
    ],
)
def test_any_other_shape_is_named(field: str, value: float) -> None:
    obstacle = hopper_shape_obstacle(replace(preset("gpt-oss-20b"), **{field: value}))  # type: ignore[arg-type]
    assert obstacle is not None
    assert obstacle.startswith(f"{field} is {value}, ")


def test_attention_of_chunks_refuses_a_window_shorter_than_a_page() -> None:
    query = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    layer = torch.zeros(1, 1, 2, 64, 64, dtype=torch.bfloat16)
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    sequences = PagedSequences(torch.zeros(1, 1, dtype=torch.int32), starts, lengths, torch.zeros(2).long())
    with pytest.raises(ValueError, match="window of 63"):
        hopper_prefill_attention(query, layer, sequences, torch.zeros(8), 63, 0.125, 2)
