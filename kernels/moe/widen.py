"""Streamed MXFP4 weights -> e4m3 tiles on the GPU, in one pass over the bytes.

A card that has no room for FP8 weights (gpt-oss-120b on one H200) keeps the streamed form and widens one
layer at a time into a scratch layer before the grouped GEMM; a smaller model widens all layers once, at load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.fp8_weights import TILE, TILES_K, Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.streamed import TILE_ROWS, StreamedExperts


def empty_layer(streamed: StreamedExperts) -> Fp8Experts:
    """Unwritten e4m3 tiles of ``streamed``'s shape, for ``widen_layer``; the biases are shared.

    ``inexact_tiles`` of the result is 0: what was rounded is counted by ``widen_layer``.
    """

    def empty_matrix(packed: Tensor) -> Fp8Matrix:
        experts, row_tiles = packed.shape[0], -(-packed.shape[1] * TILE_ROWS // TILE)
        shape = (experts, row_tiles, TILES_K)
        return Fp8Matrix(
            torch.empty(*shape, TILE * TILE, dtype=torch.uint8, device=packed.device),
            torch.empty(shape, dtype=torch.float32, device=packed.device),
            inexact_tiles=0,
        )

    return Fp8Experts(
        empty_matrix(streamed.gate_up),
        streamed.gate_up_bias,
        empty_matrix(streamed.down),
        streamed.down_bias,
    )


def widen_layer(streamed: StreamedExperts, out: Fp8Experts, inexact_tiles: Tensor | None = None) -> None:
    """Fill ``out`` (biases excepted) from ``streamed``, on the current stream.

    Args:
        inexact_tiles: [1] int32 on the device; the number of tiles that were rounded is added to it.

    Raises:
        ValueError: ``out`` was made for other shapes.
    """
    counter = 0 if inexact_tiles is None else inexact_tiles.data_ptr()
    for packed, matrix, interleaved in (
        (streamed.gate_up, out.gate_up, True),
        (streamed.down, out.down, False),
    ):
        experts, row_tiles = packed.shape[:2]
        expected = (experts, -(-row_tiles * TILE_ROWS // TILE), TILES_K, TILE * TILE)
        if tuple(matrix.values.shape) != expected:
            raise ValueError(f"out holds tiles {tuple(matrix.values.shape)}, expected {expected}")
        launch(
            "widen",
            *(packed.data_ptr(), experts, row_tiles, int(interleaved)),
            *(matrix.values.data_ptr(), matrix.scales.data_ptr(), counter),
        )
