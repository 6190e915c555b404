"""The norms behind a chunk's projections, thread by thread on the host, against the plain ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.streamed import DIM

EPS, TOKENS = 1e-5, 5


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["moe/csrc/chunk_norm.cu"])


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def test_adds_and_norms(library: Any) -> None:
    torch.manual_seed(1)
    delta, residual = (torch.randn(TOKENS, DIM).bfloat16() * scale for scale in (0.3, 20.0))
    gain = torch.randn(DIM).bfloat16()
    expected = residual + delta
    out = torch.full_like(delta, float("nan"))
    library.call("moe_chunk_add_norm", delta, residual, gain, out, EPS, TOKENS)
    assert torch.equal(residual, expected)
    assert relative_error(out, reference.rms_norm(expected.float(), gain.float(), EPS)) <= 3e-3


def test_sums_the_experts_of_each_token_in_order(library: Any) -> None:
    torch.manual_seed(2)
    rows = torch.randn(40, DIM).bfloat16()
    slots = torch.randperm(40)[: 4 * TOKENS].reshape(TOKENS, 4).int()
    slots[1, 2] = slots[3, 0] = -1  # experts of other ranks
    slots[4] = -1  # padding
    terms = torch.where((slots >= 0)[..., None], rows[slots.long()].float(), 0.0)
    moe = torch.zeros(TOKENS, DIM)
    for k in range(4):
        moe += terms[:, k]
    residual, gain = torch.randn(TOKENS, DIM).bfloat16(), torch.randn(DIM).bfloat16()
    expected = residual + moe.bfloat16()
    out = torch.full_like(residual, float("nan"))
    library.call("moe_chunk_combine_norm", rows, slots, residual, gain, out, EPS, TOKENS)
    assert torch.equal(residual, expected)
    assert relative_error(out, reference.rms_norm(expected.float(), gain.float(), EPS)) <= 3e-3
