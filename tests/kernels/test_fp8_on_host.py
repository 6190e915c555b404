"""FP8 products of a chunk, thread by thread on the host: experts and projections, in both sizes of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.dense.fp8_projection import Fp8Projection, activation_bytes, choose_tile
from antiphon.kernels.moe.fp8_weights import TILE, TILES_K, Fp8Experts
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

EXPERTS, BLOCKS, BOUND = 2, 2, 4e-2


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"moe/csrc/{name}.cu" for name in ("fp8_projection", "fp8_gemm", "fp8_route")])


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def quantised(x: Tensor) -> Tensor:
    """What e4m3 with one scale for 128 columns of a token keeps."""
    parts = []
    for part in x.float().split(TILE, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("columns", "rows", "tokens", "tile"),
    [(2880, 136, 200, 256), (2880, 136, 150, 128), (4096, 128, 70, 128), (4096, 8, 257, 256)],
)
def test_a_projection_is_that_of_the_rounded_operands(
    library: Any, columns: int, rows: int, tokens: int, tile: int
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(tokens, columns).bfloat16() * (1 + 9 * torch.rand(tokens, 1)).bfloat16()
    weight, bias = torch.randn(rows, columns) / columns**0.5, torch.randn(rows).bfloat16()
    projection = Fp8Projection.from_weight(weight, bias)
    held = -(-tokens // tile) * tile
    activations = torch.full((activation_bytes(held, columns),), 0x7F, dtype=torch.uint8)
    out = torch.full((tokens + 1, rows), float("nan")).bfloat16()
    library.call(
        "moe_fp8_project",
        *(x, activations, projection.values, projection.scales, projection.bias, out),
        *(tokens, columns, rows, tile, BLOCKS),
    )
    assert out[tokens].isnan().all()
    exact = quantised(x) @ projection.widen().T + bias.float()
    assert relative(out[:tokens], exact) <= 3e-3
    assert relative(out[:tokens], x.float() @ weight.T + bias.float()) <= BOUND


def test_rounding_of_a_matrix_is_that_of_e4m3() -> None:
    """Tiles apart by 2^20 lose no more than others; zeros stay zeros."""
    torch.manual_seed(1)
    weight = torch.randn(200, 2880)
    weight[:128, :128] *= 2.0**20
    weight[128:, 256:384] = 0
    wide = Fp8Projection.from_weight(weight, torch.zeros(200)).widen()
    assert relative(wide[:128, :128], weight[:128, :128]) <= 0.03
    assert relative(wide[128:], weight[128:]) <= 0.03
    assert not wide[128:, 256:384].any()
    with pytest.raises(ValueError, match="columns must be"):
        Fp8Projection.from_weight(weight[:, :2879], torch.zeros(200))


@pytest.mark.parametrize(("tokens", "tile"), [(1024, 128), (8191, 256), (8192, 256)])
def test_tiles_fill_the_last_round(tokens: int, tile: int) -> None:
    assert choose_tile(tokens, 5120, 132) == tile


class Layer:
    def __init__(self) -> None:
        torch.manual_seed(0)

        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8)
            return ExpertMatrix(blocks, torch.randint(116, 121, (EXPERTS, rows, 90), dtype=torch.uint8))

        self.gate_up, self.down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * DIM).bfloat16()
        self.down_bias = torch.randn(EXPERTS, DIM).bfloat16()
        self.fp8 = Fp8Experts.from_checkpoint(self.gate_up, self.gate_up_bias, self.down, self.down_bias)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


@pytest.mark.parametrize(("tile", "tokens"), [(128, 66), (256, 3)])
def test_experts_follow_the_plain_op(library: Any, layer: Layer, tile: int, tokens: int) -> None:
    """Expert 1 gets a pair of every token, 66 of which are work for both warpgroups; expert 0 gets one."""
    fp8 = layer.fp8
    x = torch.randn(tokens, DIM).bfloat16()
    ids = torch.full((tokens, 4), -1)
    ids[:, 2] = 1
    ids[2, 0] = 0
    weights = torch.softmax(torch.randn(tokens, 4), -1).bfloat16()
    pairs, most = ids.numel(), ids.numel() // tile + EXPERTS
    rank, slots = (torch.full((pairs,), -(2**30), dtype=torch.int32) for _ in range(2))
    counts, first_tile = (torch.full((EXPERTS,), -(2**30), dtype=torch.int32) for _ in range(2))
    tiles = torch.full((most, 4), -(2**30), dtype=torch.int32)
    tile_count, ticket = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    activations = torch.full((most * TILES_K * tile * (TILE + 4),), 0x7F, dtype=torch.uint8)
    hidden = torch.full((most * TILES_K * tile * TILE,), 0x7F, dtype=torch.uint8)
    row_weight = torch.full((most * tile,), float("nan"))
    rows = torch.full((most * tile, DIM), float("nan")).bfloat16()
    library.call(
        "moe_fp8_rank",
        *(ids, rank, counts, first_tile, tiles, tile_count, ticket, pairs, 0, EXPERTS, tile),
    )
    library.call(
        "moe_fp8_quantise",
        *(x, ids, weights, rank, first_tile, activations, row_weight, slots, tokens, 0, EXPERTS, tile),
    )
    library.call(
        "moe_fp8_gate_up",
        *(activations, fp8.gate_up.values, fp8.gate_up.scales, fp8.gate_up_bias, tiles, tile_count),
        *(hidden, tile, BLOCKS),
    )
    library.call(
        "moe_fp8_down",
        *(hidden, fp8.down.values, fp8.down.scales, fp8.down_bias, tiles, tile_count, row_weight, rows),
        *(tile, BLOCKS),
    )
    placed = slots.reshape(tokens, 4).long()
    out = torch.where((placed >= 0)[..., None], rows[placed].float(), 0.0).sum(1)
    expected = reference.moe(
        *(x.float(), ids.clamp_min(0), torch.where(ids < 0, 0.0, weights.float())),
        *(dequantize_mxfp4(layer.gate_up), layer.gate_up_bias.float()),
        *(dequantize_mxfp4(layer.down), layer.down_bias.float()),
    )
    assert relative(out, expected) <= BOUND
