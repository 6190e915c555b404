"""MXFP4 expert weights in the order in which the streaming kernel reads them.

The kernel works on tiles of 64 rows and stages of 6 blocks (192 columns). A stage is one contiguous run of
6,528 bytes, fetched by a single bulk copy: the packed values, ordered so that a lane's 16-byte load is the
tensor-core operand of two blocks, then the block scales. The conversion only moves bits: it is undone
exactly by ``unpack_matrix``.

Byte of two values: bits 7 4 3 2 hold sign, exponent and mantissa of the first (where e4m3 has them), bits
5 6 1 0 those of the second, so that one and five integer operations expand eight values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.reference import MXFP4_BLOCK, ExpertMatrix

DIM = 2880
"""Columns of both projections: hidden size and expert size of GPT-OSS."""
SPLIT_COLUMNS = (1536, 768, 384)
"""Columns of the second projection that one of 2, 4 or 8 ranks holds of every expert, padding included."""
TILE_ROWS = 64
STAGE_BLOCKS = 6
STAGES = DIM // MXFP4_BLOCK // STAGE_BLOCKS
"""Of a row of ``DIM`` columns."""
STAGE_WEIGHT_BYTES = STAGE_BLOCKS * TILE_ROWS * MXFP4_BLOCK // 2
STAGE_BYTES = STAGE_WEIGHT_BYTES + STAGE_BLOCKS * TILE_ROWS


@dataclass(frozen=True, slots=True)
class StreamedExperts:
    """Both projections of a layer's experts, ready for the streaming kernel.

    I is 2880 of whole experts, and one of ``SPLIT_COLUMNS`` of those that ranks hold columns of.

    Attributes:
        gate_up: [E, I / 32, 15, 6528] uint8; gate row 2i and up row 2i + 1 meet in one thread.
        gate_up_bias: [E, 2 I] bf16, in the checkpoint's order.
        down: [E, 45, I / 192, 6528] uint8.
        down_bias: [E, 2880] bf16.
    """

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    @property
    def experts(self) -> int:
        """Experts held here."""
        return self.gate_up.shape[0]

    @property
    def columns(self) -> int:
        """Of the second projection: the expert size, or what a rank holds of it."""
        return self.down.shape[2] * STAGE_BLOCKS * MXFP4_BLOCK

    @property
    def split(self) -> bool:
        """Whether these are columns of experts, which take kernels of their own."""
        return self.columns != DIM

    @classmethod
    def from_checkpoint(
        cls, gate_up: ExpertMatrix, gate_up_bias: Tensor, down: ExpertMatrix, down_bias: Tensor
    ) -> StreamedExperts:
        """Convert one layer; same bytes in another order.

        Args:
            gate_up: rows 2 I (interleaved, gate even), 2880 columns. gate_up_bias: [E, 2 I].
            down: rows 2880, I columns. down_bias: [E, 2880]. Columns that pad I have zero weights in both
                projections and zero biases, and then add nothing.

        Raises:
            ValueError: shapes are not GPT-OSS's, or a block scale is the NaN code (255).
        """
        experts, inner = gate_up.blocks.shape[0], down.scales.shape[-1] * MXFP4_BLOCK
        if inner not in (DIM, *SPLIT_COLUMNS):
            raise ValueError(
                f"down: {inner} columns; the kernels take {DIM}, or of split experts {SPLIT_COLUMNS}"
            )
        for name, tensor, rows, columns in (("gate_up", gate_up, 2 * inner, DIM), ("down", down, DIM, inner)):
            expected = (experts, rows, columns // MXFP4_BLOCK)
            if tuple(tensor.scales.shape) != expected or tuple(tensor.blocks.shape) != (*expected, 16):
                raise ValueError(
                    f"{name}: blocks {tuple(tensor.blocks.shape)}, scales {tuple(tensor.scales.shape)}; "
                    f"the streaming kernel takes blocks {(*expected, 16)}, scales {expected}"
                )
        for name, bias, rows in (("gate_up_bias", gate_up_bias, 2 * inner), ("down_bias", down_bias, DIM)):
            if tuple(bias.shape) != (experts, rows):
                raise ValueError(f"{name}: {tuple(bias.shape)}, expected {(experts, rows)}")
        return cls(
            gate_up=pack_matrix(gate_up, interleaved=True),
            gate_up_bias=gate_up_bias.to(torch.bfloat16).contiguous(),
            down=pack_matrix(down, interleaved=False),
            down_bias=down_bias.to(torch.bfloat16).contiguous(),
        )


def pack_matrix(matrix: ExpertMatrix, interleaved: bool) -> Tensor:
    """Checkpoint layout -> [E, rows / 64, stages, 6528] uint8, expert by expert.

    Args:
        matrix: [E, rows, 6 stages, 16] and [E, rows, 6 stages]; 15 stages are 2880 columns.
        interleaved: rows alternate between two halves (gate, up) that must meet in one thread.

    Raises:
        ValueError: a scale is 255, which means NaN.
    """
    if bool((matrix.scales == 255).any()):
        raise ValueError("an MXFP4 block scale is 255 (NaN)")
    experts, rows, blocks = matrix.scales.shape
    shape = (experts, rows // TILE_ROWS, blocks // STAGE_BLOCKS, STAGE_BYTES)
    packed = torch.empty(shape, dtype=torch.uint8, device=matrix.blocks.device)
    for expert in range(experts):
        values = packed[expert, :, :, :STAGE_WEIGHT_BYTES]
        values.copy_(_pack_values(matrix.blocks[expert], interleaved).view(values.shape))
        scales = packed[expert, :, :, STAGE_WEIGHT_BYTES:]
        scales.copy_(_pack_scales(matrix.scales[expert], interleaved).view(scales.shape))
    return packed


def unpack_matrix(packed: Tensor, interleaved: bool) -> ExpertMatrix:
    """The inverse of ``pack_matrix``: [E, rows / 64, stages, 6528] -> the checkpoint's layout."""
    experts, tiles, stages = packed.shape[:3]
    rows, blocks = tiles * TILE_ROWS, stages * STAGE_BLOCKS
    values = packed[..., :STAGE_WEIGHT_BYTES].reshape(experts * tiles, stages, 3, 4, 8, 4, 2, 2, 4)
    first = ((values >> 4) & 8) | ((values >> 2) & 7)
    second = ((values >> 2) & 8) | ((values >> 4) & 4) | (values & 3)
    # [tile, stage, pair, warp, g, t, block, half, j, m] -> [tile, row, stage, pair, block, half, t, j]
    codes = torch.stack((first, second), dim=-1).permute(
        0, 3, *_row_order(4, 9, interleaved), 1, 2, 6, 7, 5, 8
    )
    codes = codes.reshape(experts, rows, blocks, MXFP4_BLOCK)
    scales = packed[..., STAGE_WEIGHT_BYTES:].reshape(experts * tiles, stages, 4, 8, STAGE_BLOCKS, 2)
    scales = scales.permute(0, 2, *_row_order(3, 5, interleaved), 1, 4).reshape(experts, rows, blocks)
    return ExpertMatrix((codes[..., ::2] | (codes[..., 1::2] << 4)).contiguous(), scales.contiguous())


def _row_order(within: int, half: int, interleaved: bool) -> tuple[int, int]:
    """Order of the two dimensions that make a row's place in its 16: which is the slower one."""
    return (within, half) if interleaved else (half, within)


def _pack_values(blocks: Tensor, interleaved: bool) -> Tensor:
    """[rows, blocks, 16] -> [tile, stage, pair, warp, g, t, block, half, j] packed bytes of two rows."""
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)  # [rows, blocks, 16, 2], in column order
    halves = (8, 2) if interleaved else (2, 8)
    codes = codes.reshape(-1, 4, *halves, blocks.shape[1] // STAGE_BLOCKS, STAGE_BLOCKS // 2, 2, 2, 4, 4)
    first, second = codes.unbind(3 if interleaved else 2)  # rows g and g + 8 of the operand
    byte = ((first & 8) << 4) | ((first & 7) << 2) | ((second & 8) << 2) | ((second & 4) << 4) | (second & 3)
    # [tile, warp, g, stage, pair, block, half, t, j]
    return byte.permute(0, 3, 4, 1, 2, 7, 5, 6, 8).contiguous()


def _pack_scales(scales: Tensor, interleaved: bool) -> Tensor:
    """[rows, blocks] -> [tile, stage, warp, g, block, half of the 16 rows]."""
    halves = (8, 2) if interleaved else (2, 8)
    shaped = scales.reshape(-1, 4, *halves, scales.shape[1] // STAGE_BLOCKS, STAGE_BLOCKS)
    within, half = (2, 3) if interleaved else (3, 2)
    return shaped.permute(0, 4, 1, within, 5, half).contiguous()
