"""MXFP4 to e4m3 tiles: exact where the exponents allow it, counted where they do not."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels.moe.fp8_weights import (
    TILES_K,
    Fp8Experts,
    convert_matrix,
    exchange_chunks,
    widen_matrix,
)
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4


def random_matrix(rows: int, low: int, high: int, experts: int = 1) -> ExpertMatrix:
    return ExpertMatrix(
        torch.randint(0, 256, (experts, rows, 90, 16), dtype=torch.uint8),
        torch.randint(low, high, (experts, rows, 90), dtype=torch.uint8),
    )


@pytest.mark.parametrize("rows", [128, 192, 256])
def test_exponents_within_fourteen_lose_nothing(rows: int) -> None:
    matrix = random_matrix(rows, 105, 120, experts=2)
    tiles = convert_matrix(matrix)
    assert tiles.inexact_tiles == 0
    assert tiles.tiles == 2 * -(-rows // 128) * TILES_K
    assert torch.equal(widen_matrix(tiles, rows), dequantize_mxfp4(matrix))


def test_wider_exponents_are_counted_per_tile() -> None:
    matrix = random_matrix(256, 110, 111)
    matrix.blocks[:] |= 0x11  # no zeros: every value is at least a half
    matrix.scales[0, 5, 9] = 125  # tile (0, 2): 15 above the rest
    matrix.scales[0, 200, 88] = 124  # tile (1, 22): 14 above, still exact
    tiles = convert_matrix(matrix)
    assert tiles.inexact_tiles == 1
    wide, exact = widen_matrix(tiles, 256), dequantize_mxfp4(matrix)
    differs = (wide != exact)[0]
    assert differs[:128, 256:384].any()
    differs[:128, 256:384] = False
    assert not differs.any()
    assert float((wide - exact).norm() / exact.norm()) < 1e-4


def test_blocks_of_zeros_set_no_exponent() -> None:
    matrix = random_matrix(128, 110, 111)
    matrix.blocks[0, 7, 3] = 0x80
    matrix.scales[0, 7, 3] = 200
    tiles = convert_matrix(matrix)
    assert tiles.inexact_tiles == 0
    assert torch.equal(widen_matrix(tiles, 128), dequantize_mxfp4(matrix))


def test_bytes_lie_where_the_tensor_core_reads_them() -> None:
    matrix = random_matrix(128, 120, 121)
    tiles = convert_matrix(matrix)
    weights = dequantize_mxfp4(matrix)[0]
    for row, column in ((0, 0), (1, 17), (7, 127), (93, 1300), (127, 2879), (64, 2816)):
        tile, byte = column // 128, column % 128
        at = row * 128 + ((byte // 16) ^ (row % 8)) * 16 + byte % 16
        code = tiles.values[0, 0, tile, at].view(torch.float8_e4m3fn)
        assert float(code.float() * tiles.scales[0, 0, tile]) == float(weights[row, column])
    assert not tiles.values[0, 0, -1].view(128, 8, 16)[0, 4:].any()  # columns beyond 2880


def test_exchange_is_its_own_inverse() -> None:
    tiles = torch.randint(0, 256, (3, 128, 8, 16), dtype=torch.uint8)
    assert torch.equal(exchange_chunks(exchange_chunks(tiles)), tiles)
    assert not torch.equal(exchange_chunks(tiles), tiles)


def test_wrong_shapes_are_refused() -> None:
    matrix = random_matrix(64, 110, 111)
    bias = torch.zeros(1, 64)
    with pytest.raises(ValueError, match="gate_up: scales"):
        Fp8Experts.from_checkpoint(matrix, bias, matrix, bias)
