"""The two files that a rank's converted experts make: which tensors they hold, and back again.

Ranks that split experts have the first one only. Its tensors are named after the part that it holds, so that
even under another name it is not taken for another rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from antiphon.kernels.moe.fp8_weights import TILE, TILES_K, Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.mixed import RowExponents
from antiphon.kernels.moe.streamed import (
    DIM,
    STAGE_BLOCKS,
    STAGE_BYTES,
    TILE_ROWS,
    StreamedExperts,
)
from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.weight_cache.weight_file import TensorForm

_STAGE_COLUMNS = STAGE_BLOCKS * MXFP4_BLOCK
_MATRICES = (("gate_up", 2 * DIM), ("down", DIM))
"""Of whole experts, with their rows."""

StreamedPart = tuple[StreamedExperts, RowExponents]


def streamed_forms(layers: int, experts: int, columns: int = DIM, part: str = "") -> list[TensorForm]:
    """Of the file that every rank has: MXFP4 in the streaming kernel's order, biases, row exponents.

    Args:
        columns: of the second projection, padding included.
        part: which part of each expert; empty for whole ones.
    """
    forms = []
    for layer in range(layers):
        block = f"block.{layer}.{part}." if part else f"block.{layer}."
        for name, rows, inputs in (("gate_up", 2 * columns, DIM), ("down", DIM, columns)):
            at = block + name
            packed = (experts, rows // TILE_ROWS, inputs // _STAGE_COLUMNS, STAGE_BYTES)
            forms += [
                TensorForm(f"{at}.streamed", packed, torch.uint8),
                TensorForm(f"{at}.bias", (experts, rows), torch.bfloat16),
                TensorForm(f"{at}.exponents", (experts, rows), torch.uint8),
            ]
        forms.append(TensorForm(f"{block}inexact_blocks", (1,), torch.int64))
    return forms


def streamed_tensors(layer: ConvertedExperts) -> list[Tensor]:
    """One layer's, in the order of ``streamed_forms``."""
    streamed, exponents = layer.streamed, layer.exponents
    return [
        *(streamed.gate_up, streamed.gate_up_bias, exponents.gate_up),
        *(streamed.down, streamed.down_bias, exponents.down),
        torch.tensor([exponents.inexact_blocks]),
    ]


def streamed_layers(tensors: Iterator[Tensor], layers: int) -> Iterator[StreamedPart]:
    """Layer by layer, from tensors in the order of ``streamed_forms``."""
    for _ in range(layers):
        gate_up, gate_up_bias, gate_up_top, down, down_bias, down_top, inexact = _take(tensors, 7)
        experts = StreamedExperts(gate_up, gate_up_bias, down, down_bias)
        columns = gate_up_top.numel() * DIM + down_top.numel() * experts.columns
        yield experts, RowExponents(gate_up_top, down_top, int(inexact), columns // MXFP4_BLOCK)


def fp8_forms(layers: int, experts: int) -> list[TensorForm]:
    """Of the file that ranks with resident FP8 experts have besides: tiles and their scales."""
    forms = []
    for layer in range(layers):
        for name, rows in _MATRICES:
            at = f"block.{layer}.{name}"
            grid = (experts, -(-rows // TILE), TILES_K)
            forms += [
                TensorForm(f"{at}.fp8", (*grid, TILE * TILE), torch.uint8),
                TensorForm(f"{at}.fp8_scales", grid, torch.float32),
            ]
        forms.append(TensorForm(f"block.{layer}.inexact_tiles", (len(_MATRICES),), torch.int64))
    return forms


def fp8_tensors(layer: ConvertedExperts) -> list[Tensor]:
    """One layer's, in the order of ``fp8_forms``.

    Raises:
        ValueError: the layer has no FP8 experts.
    """
    if layer.fp8 is None:
        raise ValueError("these experts were converted without their FP8 form")
    gate_up, down = layer.fp8.gate_up, layer.fp8.down
    inexact = torch.tensor([gate_up.inexact_tiles, down.inexact_tiles])
    return [gate_up.values, gate_up.scales, down.values, down.scales, inexact]


def fp8_layers(tensors: Iterator[Tensor], streamed: Sequence[StreamedPart]) -> Iterator[Fp8Experts]:
    """Layer by layer, from tensors in the order of ``fp8_forms``; biases are those of the other file."""
    for experts, _ in streamed:
        gate_up, gate_up_scales, down, down_scales, inexact = _take(tensors, 5)
        of_gate_up, of_down = inexact.tolist()
        yield Fp8Experts(
            Fp8Matrix(gate_up, gate_up_scales, of_gate_up),
            experts.gate_up_bias,
            Fp8Matrix(down, down_scales, of_down),
            experts.down_bias,
        )


def _take(tensors: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(tensors) for _ in range(count)]
