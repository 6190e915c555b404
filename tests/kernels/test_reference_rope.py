"""Rotary frequencies against the closed form and against transformers, and the rotation itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.kernels.reference import rope, yarn_inv_freq

PUBLISHED = {
    "head_dim": 64,
    "theta": 150_000.0,
    "factor": 32.0,
    "original_context": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LOW, HIGH = 8.092779115512402, 17.39802450158856
CONCENTRATION = 1.3465735902799727


def transformers_table(truncate: bool) -> tuple[torch.Tensor, float]:
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = GptOssConfig(num_hidden_layers=2)
    config.rope_parameters = {**config.rope_parameters, "truncate": truncate, "rope_theta": 150_000.0}
    table: Any = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    return table


def test_table_equals_transformers() -> None:
    inv_freq, concentration = yarn_inv_freq(**PUBLISHED)
    expected, scaling = transformers_table(truncate=False)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert concentration == pytest.approx(scaling, abs=1e-12)
    assert concentration == pytest.approx(CONCENTRATION, abs=1e-12)


def test_table_follows_the_ramp() -> None:
    """Below ``LOW`` untouched, above ``HIGH`` divided by the factor, between them a mixture."""
    inv_freq, _ = yarn_inv_freq(**PUBLISHED)
    for i, value in enumerate(inv_freq.tolist()):
        plain = 150_000.0 ** (-2 * i / 64)
        ramp = min(1.0, max(0.0, (i - LOW) / (HIGH - LOW)))
        assert value == pytest.approx(plain * (1 - ramp) + plain / 32 * ramp, rel=1e-6), i


def test_truncation_would_change_the_table() -> None:
    inv_freq, _ = yarn_inv_freq(**PUBLISHED)
    truncated, _ = transformers_table(truncate=True)
    assert ((inv_freq - truncated) / inv_freq).abs().max() > 0.1


def test_factor_of_one_is_plain_rope() -> None:
    inv_freq, concentration = yarn_inv_freq(**{**PUBLISHED, "factor": 1.0})
    expected = 150_000.0 ** (-torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)
    assert concentration == 1.0


def test_rotates_halves_by_position() -> None:
    settings = SimpleNamespace(position=7, concentration=1.25, freq=0.3)
    x = torch.tensor([[[2.0, 5.0]]])
    out = rope(x, torch.tensor([settings.position]), torch.tensor([settings.freq]), settings.concentration)
    angle = settings.position * settings.freq
    expected = [2 * math.cos(angle) - 5 * math.sin(angle), 5 * math.cos(angle) + 2 * math.sin(angle)]
    torch.testing.assert_close(out.flatten(), torch.tensor(expected) * settings.concentration)


def test_scores_depend_on_distance_only() -> None:
    inv_freq, concentration = yarn_inv_freq(**PUBLISHED)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 64, generator=generator) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        q = rope(query, torch.tensor([query_position]), inv_freq, concentration)
        k = rope(key, torch.tensor([key_position]), inv_freq, concentration)
        return (q * k).sum().item()

    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=2e-3)
    assert abs(score(5, 2) - score(5, 3)) > 0.01


def test_keeps_the_dtype() -> None:
    inv_freq, concentration = yarn_inv_freq(**PUBLISHED)
    x = torch.ones(2, 3, 64, dtype=torch.bfloat16)
    assert rope(x, torch.tensor([0, 1]), inv_freq, concentration).dtype == torch.bfloat16
