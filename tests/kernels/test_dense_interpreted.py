"""The Triton norm and rotation kernels against the plain ops, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels import reference
from antiphon.kernels.dense.norm import add_rms_norm_, rms_norm
from antiphon.kernels.dense.rope import rope_and_write, rotation_table

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)


@pytest.mark.parametrize("hidden", [256, 2880])
def test_norm_with_and_without_residual(hidden: int) -> None:
    x, delta, weight = torch.randn(3, hidden), torch.randn(3, hidden), torch.randn(hidden)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected, total = reference.add_rms_norm(delta, x, weight, 1e-5)
    residual = x.clone()
    torch.testing.assert_close(add_rms_norm_(delta, residual, weight, 1e-5), expected)
    torch.testing.assert_close(residual, total)


def test_rotation_and_page_write() -> None:
    query_heads, kv_heads, dim, page = 16, 2, 64, 64
    inv_freq, concentration = reference.yarn_inv_freq(dim, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq, concentration, 5000)
    qkv = torch.randn(5, (query_heads + 2 * kv_heads) * dim)
    positions = torch.tensor([0, 5, 4999, 77, 9])
    slot = torch.tensor([3, 64, -1, 130, 7])
    cache = torch.full((4, 3, kv_heads, 2, page, dim), 7.0)
    plain = cache.clone()
    query = torch.full((5, query_heads, dim), float("nan"))
    rope_and_write(qkv, positions, slot, table, cache[:, 1], query_heads, query)
    q, k, v = qkv.view(5, -1, dim).split([query_heads, kv_heads, kv_heads], 1)
    reference.write_kv(reference.rope(k, positions, inv_freq, concentration), v, plain[:, 1], slot)
    torch.testing.assert_close(
        query, reference.rope(q, positions, inv_freq, concentration), rtol=2e-3, atol=2e-3
    )
    torch.testing.assert_close(cache, plain, rtol=2e-3, atol=2e-3)
    assert torch.equal(cache[:, [0, 2]], plain[:, [0, 2]])
