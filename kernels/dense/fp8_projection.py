"""The attention's projections of a long chunk in FP8 on sm_90: e4m3 weights in 128 x 128 tiles, float32 sums.

Two launches: quantise the activations, with a scale per token and 128 columns; multiply, by the same products
as the grouped GEMM of resident FP8 experts, and add the bias in the epilogue. Both operands are rounded to
e4m3, so the relative error of an output is about 4 %, where that of bf16 operands is 0.3 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.fp8_weights import TILE, exchange_chunks

COLUMNS = (2880, 4096)
"""Widths of inputs that the kernels are built for: hidden size, and all heads."""
TILES = (128, 256)
"""Tokens of a tile that they are built for."""
MIN_TOKENS = 1024
"""Of a chunk that takes them: below, cuBLAS's own FP8 products gain nothing over bf16 on an H200."""
_LARGEST = 448.0
"""Of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Projection:
    """One matrix and its bias.

    Attributes:
        values: [row tiles, column tiles, 16384] e4m3 bytes, in the layout of ``fp8_weights.Fp8Matrix``.
        scales: [row tiles, column tiles] float32.
        bias: [rows] bf16.
        columns: of the matrix.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor
    columns: int

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.bias.shape[0]

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor) -> Fp8Projection:
        """Round a matrix [rows, columns] to e4m3; each tile's largest value becomes e4m3's largest, 448.

        Raises:
            ValueError: no kernel is built for such columns, or the bias has other rows.
        """
        rows, columns = weight.shape
        if columns not in COLUMNS or tuple(bias.shape) != (rows,):
            raise ValueError(
                f"a projection of {tuple(weight.shape)} with bias {tuple(bias.shape)}; "
                f"columns must be one of {COLUMNS}, the bias one a row"
            )
        row_tiles, column_tiles = -(-rows // TILE), -(-columns // TILE)
        pad = (0, column_tiles * TILE - columns, 0, row_tiles * TILE - rows)
        padded = torch.nn.functional.pad(weight.float(), pad)
        tiles = padded.view(row_tiles, TILE, column_tiles, TILE).transpose(1, 2)
        peaks = tiles.abs().amax(dim=(-2, -1))
        scales = torch.where(peaks > 0, peaks / _LARGEST, 1.0)
        narrow = (tiles / scales[..., None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        chunks = narrow.reshape(row_tiles, column_tiles, TILE, TILE // 16, 16)
        values = exchange_chunks(chunks).flatten(2).contiguous()
        return cls(values, scales.contiguous(), bias.to(torch.bfloat16).contiguous(), columns)

    def widen(self) -> Tensor:
        """[rows, columns] float32: what the tiles stand for."""
        row_tiles, column_tiles = self.scales.shape
        tiles = exchange_chunks(self.values.view(row_tiles, column_tiles, TILE, TILE // 16, 16)).flatten(-2)
        values = tiles.view(torch.float8_e4m3fn).float() * self.scales[..., None, None]
        whole = values.transpose(1, 2).reshape(row_tiles * TILE, column_tiles * TILE)
        return whole[: self.rows, : self.columns].contiguous()


class ProjectionWorkspace:
    """Quantised activations of one chunk; projections of all layers use it in turn, on one stream.

    Args:
        max_tokens: largest chunk.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        rows = -(-max_tokens // max(TILES)) * max(TILES)
        self.activations = torch.empty(activation_bytes(rows), dtype=torch.uint8, device=device)


def activation_bytes(rows: int, columns: int = max(COLUMNS)) -> int:
    """Of the quantised activations of so many tokens, a multiple of the tile."""
    return rows * -(-columns // TILE) * (TILE + 4)


def choose_tile(tokens: int, rows: int, blocks: int) -> int:
    """Tokens of a tile: whichever leaves fewer blocks without work in the last round, the larger when equal.

    Args:
        rows: of the matrix. blocks: that work at the same time.
    """

    def rounds(tile: int) -> int:
        return -(-(-(-tokens // tile) * -(-rows // TILE)) // blocks) * tile

    return min(reversed(TILES), key=rounds)


def project(
    x: Tensor,
    projection: Fp8Projection,
    workspace: ProjectionWorkspace,
    out: Tensor | None = None,
    tile: int | None = None,
) -> Tensor:
    """``x W^T + bias``.

    Args:
        x: [T, columns] bf16. out: [T, rows] bf16, allocated when None.
        tile: tokens of a tile, one of TILES; ``choose_tile`` when None.

    Raises:
        ValueError: another shape, dtype or tile, or more tokens than the workspace holds.
    """
    tokens, rows = x.shape[0], projection.rows
    if not 1 <= tokens <= workspace.max_tokens:
        raise ValueError(f"{tokens} tokens, the workspace holds 1 to {workspace.max_tokens}")
    tile = choose_tile(tokens, rows, workspace.blocks) if tile is None else tile
    if tile not in TILES:
        raise ValueError(f"tiles of {tile} tokens, expected one of {TILES}")
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device) if out is None else out
    for name, tensor, shape in (("x", x, (tokens, projection.columns)), ("out", out, (tokens, rows))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous bfloat16 {shape}"
            )
    launch(
        "fp8_project",
        *(x.data_ptr(), workspace.activations.data_ptr(), projection.values.data_ptr()),
        *(projection.scales.data_ptr(), projection.bias.data_ptr(), out.data_ptr()),
        *(tokens, projection.columns, rows, tile, workspace.blocks),
    )
    return out
