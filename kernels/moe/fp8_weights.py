"""MXFP4 experts as e4m3 in 128 x 128 tiles with one scale each, laid out as the tensor core reads them.

An FP4 value times 2^d is an e4m3 number for -8 <= d <= 6, so a tile loses nothing when the exponents of its
MXFP4 blocks lie within 14 of each other. Tiles that do lose something are counted, never hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.reference import FP4_VALUES, MXFP4_BLOCK, ExpertMatrix

TILE = 128
TILES_K = -(-DIM // TILE)
TOP_EXPONENT = 6
"""The tile's largest block exponent becomes 2^6: FP4's largest value 6 becomes 384, under e4m3's 448."""
_BLOCKS = TILE // MXFP4_BLOCK


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """One projection of all experts.

    Attributes:
        values: [E, row tiles, 23, 16384] e4m3 bytes; a tile is 128 rows of 128 bytes whose 16-byte chunks are
            exchanged by ``chunk ^ (row % 8)``. Rows and columns beyond the matrix are zero.
        scales: [E, row tiles, 23] float32, powers of two.
        inexact_tiles: tiles of which at least one value was rounded.
    """

    values: Tensor
    scales: Tensor
    inexact_tiles: int

    @property
    def tiles(self) -> int:
        """Tiles in all."""
        return self.scales.numel()


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """Both projections of a layer's experts, ready for the grouped FP8 GEMM.

    Attributes:
        gate_up: rows 5760, in the checkpoint's interleaved order. gate_up_bias: [E, 5760] bf16.
        down: rows 2880. down_bias: [E, 2880] bf16.
    """

    gate_up: Fp8Matrix
    gate_up_bias: Tensor
    down: Fp8Matrix
    down_bias: Tensor

    @property
    def experts(self) -> int:
        """Experts held here."""
        return self.gate_up_bias.shape[0]

    @classmethod
    def from_checkpoint(
        cls, gate_up: ExpertMatrix, gate_up_bias: Tensor, down: ExpertMatrix, down_bias: Tensor
    ) -> Fp8Experts:
        """Convert one layer.

        Raises:
            ValueError: shapes are not GPT-OSS's.
        """
        for name, matrix, bias, rows in (
            ("gate_up", gate_up, gate_up_bias, 2 * DIM),
            ("down", down, down_bias, DIM),
        ):
            experts = matrix.scales.shape[0]
            if tuple(matrix.scales.shape) != (experts, rows, DIM // MXFP4_BLOCK):
                raise ValueError(
                    f"{name}: scales {tuple(matrix.scales.shape)}, "
                    f"expected {(experts, rows, DIM // MXFP4_BLOCK)}"
                )
            if tuple(bias.shape) != (experts, rows):
                raise ValueError(f"{name} bias: {tuple(bias.shape)}, expected {(experts, rows)}")
        return cls(
            gate_up=convert_matrix(gate_up),
            gate_up_bias=gate_up_bias.to(torch.bfloat16).contiguous(),
            down=convert_matrix(down),
            down_bias=down_bias.to(torch.bfloat16).contiguous(),
        )


def convert_matrix(matrix: ExpertMatrix) -> Fp8Matrix:
    """[E, rows, 90, 16] and [E, rows, 90] -> tiles, expert by expert."""
    experts, rows = matrix.scales.shape[:2]
    row_tiles = -(-rows // TILE)
    device = matrix.blocks.device
    values = torch.empty(experts, row_tiles, TILES_K, TILE * TILE, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, row_tiles, TILES_K, dtype=torch.float32, device=device)
    inexact = torch.zeros((), dtype=torch.int64, device=device)
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=device)
    for expert in range(experts):
        values[expert], scales[expert], rounded = _convert_expert(
            matrix.blocks[expert], matrix.scales[expert], table
        )
        inexact += rounded
    return Fp8Matrix(values, scales, int(inexact))


def _convert_expert(blocks: Tensor, scales: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = scales.shape
    row_tiles = -(-rows // TILE)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # [rows, 90, 32]
    pad = (0, TILES_K * _BLOCKS - columns, 0, row_tiles * TILE - rows)
    codes = torch.nn.functional.pad(codes, (0, 0, *pad))
    exponents = torch.nn.functional.pad(scales.to(torch.int32), pad)
    # [row tile, row, column tile, block, 32]
    codes = codes.view(row_tiles, TILE, TILES_K, _BLOCKS, MXFP4_BLOCK)
    exponents = exponents.view(row_tiles, TILE, TILES_K, _BLOCKS)
    used = ((codes & 7) != 0).any(-1)  # a block of zeros has no exponent to keep
    top = torch.where(used, exponents, 0).amax(dim=(1, 3))  # [row tile, column tile]
    shift = torch.where(used, exponents - top[:, None, :, None] + TOP_EXPONENT, 0)
    exact = torch.ldexp(table[codes.long()], shift[..., None])
    narrow = exact.to(torch.float8_e4m3fn)
    inexact = (narrow.float() != exact).any(-1).any(-1).any(1).sum()
    tiles = narrow.view(torch.uint8).permute(0, 2, 1, 3, 4).reshape(row_tiles, TILES_K, TILE, 8, 16)
    scale = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 127 - TOP_EXPONENT)
    return exchange_chunks(tiles).flatten(2), scale, inexact


def exchange_chunks(tiles: Tensor) -> Tensor:
    """[..., rows, 8 chunks, 16] -> chunk c of row r at c ^ (r % 8); its own inverse."""
    rows = torch.arange(tiles.shape[-3], device=tiles.device)
    place = torch.arange(8, device=tiles.device) ^ (rows[:, None] % 8)
    return torch.gather(tiles, -2, place[..., None].expand_as(tiles))


def widen_matrix(matrix: Fp8Matrix, rows: int) -> Tensor:
    """The values that the tiles stand for: [E, rows, 2880] float32."""
    experts, row_tiles = matrix.scales.shape[:2]
    tiles = exchange_chunks(matrix.values.view(experts, row_tiles, TILES_K, TILE, 8, 16))
    values = tiles.flatten(-2).view(torch.float8_e4m3fn).float() * matrix.scales[..., None, None]
    return values.permute(0, 1, 3, 2, 4).reshape(experts, row_tiles * TILE, -1)[:, :rows, :DIM].contiguous()
