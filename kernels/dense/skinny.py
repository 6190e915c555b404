"""Dense projections for at most 16 tokens on sm_90: CUDA kernels of our own (skinny.cu) behind torch tensors.

Each call fuses what stands around the projection: the bias, the rotation and the page write behind QKV, the
residual add behind the output projection.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.cuda_library import CudaLibrary, check_launch

MAX_TOKENS = 16
HIDDEN = 2880
QUERY_WIDTH = 4096
PART_WIDTHS = (512, 1024, 2048)
"""Of the query's width, what a rank of eight, four or two has."""

_HERE = Path(__file__).parent
LIBRARY = CudaLibrary(
    "skinny", (_HERE / "skinny.cu",), headers=(_HERE.parent / "moe" / "csrc" / "hopper.cuh",)
)


@cache
def _library() -> ctypes.CDLL:
    library = LIBRARY.load()
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.antiphon_qkv_rope.argtypes = [
        *(pointer, pointer, pointer, number, pointer, pointer, pointer, pointer, pointer, long),
        *(number, number, number, number, number, pointer),
    ]
    library.antiphon_output_projection.argtypes = [
        *(pointer, pointer, pointer, pointer, number, number, number, number, pointer)
    ]
    library.antiphon_partial_projection.argtypes = [
        *(pointer, pointer, pointer, pointer, number, number, number, number, number, pointer)
    ]
    library.antiphon_logits.argtypes = [*(pointer, pointer, pointer, number, number, number, number, pointer)]
    return library


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_options(x: Tensor, pdl: bool) -> tuple[int, int, int]:
    """Blocks, programmatic dependent launch, stream."""
    return _processors(x.device), int(pdl), torch.cuda.current_stream().cuda_stream


def _require(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous {shape} {dtype}"
        )


def _require_projection(tokens: int, rows: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens, expected 1 to {MAX_TOKENS}")
    if rows % 8:
        raise ValueError(f"{rows} rows are not a multiple of 8")


def qkv_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    slot: Tensor,
    rotation: Tensor,
    kv_layer: Tensor,
    query: Tensor,
    pdl: bool = False,
) -> Tensor:
    """QKV projection with bias, YaRN rotation, and the write of k and v to their pages.

    Args:
        x: [T, 2880] bf16, 1 <= T <= 16: states that are normed already.
        weight: [(Q + 2 G) * 64, 2880] bf16. bias: [(Q + 2 G) * 64] bf16.
        positions, slot: [T] int64; a negative slot is not stored.
        rotation: [positions, 32, 2] float32 from ``rope.rotation_table``.
        kv_layer: [N, G, 2, S, 64] bf16 view with contiguous inner dimensions.
        query: [T, Q, 64] bf16 output, returned.
        pdl: programmatic dependent launch.
    """
    tokens = x.shape[0]
    kv_heads, page_size = kv_layer.shape[1], kv_layer.shape[3]
    query_heads = query.shape[1]
    rows = (query_heads + 2 * kv_heads) * 64
    _require_projection(tokens, rows)
    _require(x, (tokens, HIDDEN), torch.bfloat16, "x")
    _require(weight, (rows, HIDDEN), torch.bfloat16, "weight")
    _require(bias, (rows,), torch.bfloat16, "bias")
    _require(positions, (tokens,), torch.int64, "positions")
    _require(slot, (tokens,), torch.int64, "slot")
    _require(query, (tokens, query_heads, 64), torch.bfloat16, "query")
    if kv_layer.dtype != torch.bfloat16 or kv_layer.shape[4] != 64 or not kv_layer[0].is_contiguous():
        raise ValueError(
            f"kv_layer is {tuple(kv_layer.shape)} {kv_layer.dtype}, expected [N, G, 2, S, 64] bf16"
        )
    status = _library().antiphon_qkv_rope(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), tokens, positions.data_ptr(), slot.data_ptr()),
        *(rotation.data_ptr(), query.data_ptr(), kv_layer.data_ptr(), kv_layer.stride(0)),
        *(query_heads, kv_heads, page_size, *_launch_options(x, pdl)),
    )
    check_launch(status, "qkv_rope")
    return query


def output_projection_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    pdl: bool = False,
) -> Tensor:
    """``residual += x @ weight.T + bias`` in place.

    Args:
        x: [T, 4096] bf16. weight: [H, 4096] bf16, H a multiple of 8. bias: [H] bf16. residual: [T, H] bf16.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    _require_projection(tokens, rows)
    _require(x, (tokens, QUERY_WIDTH), torch.bfloat16, "x")
    _require(weight, (rows, QUERY_WIDTH), torch.bfloat16, "weight")
    _require(bias, (rows,), torch.bfloat16, "bias")
    _require(residual, (tokens, rows), torch.bfloat16, "residual")
    status = _library().antiphon_output_projection(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), residual.data_ptr(), tokens, rows),
        *_launch_options(x, pdl),
    )
    check_launch(status, "output_projection")
    return residual


def partial_projection(x: Tensor, weight: Tensor, bias: Tensor, pdl: bool = False) -> Tensor:
    """A rank's part of the output projection: ``x @ weight.T + bias``.

    Args:
        x: [T, W] bf16, 1 <= T <= 16, W one of PART_WIDTHS. weight: [H, W] bf16, H a multiple of 8. bias: [H]
            bf16; zero on all ranks but one, whose parts are summed.

    Returns:
        [T, H] bf16.
    """
    tokens, width = x.shape
    rows = weight.shape[0]
    _require_projection(tokens, rows)
    if width not in PART_WIDTHS:
        raise ValueError(f"{width} columns, expected one of {PART_WIDTHS}")
    _require(x, (tokens, width), torch.bfloat16, "x")
    _require(weight, (rows, width), torch.bfloat16, "weight")
    _require(bias, (rows,), torch.bfloat16, "bias")
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    status = _library().antiphon_partial_projection(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), tokens, width, rows),
        *_launch_options(x, pdl),
    )
    check_launch(status, "partial_projection")
    return out


def logits(x: Tensor, weight: Tensor, out: Tensor, pdl: bool = False) -> Tensor:
    """Unembedding of normed states. x: [T, 2880] bf16, weight: [V, 2880] bf16 -> out [T, V] float32."""
    tokens, rows = x.shape[0], weight.shape[0]
    _require_projection(tokens, rows)
    _require(x, (tokens, HIDDEN), torch.bfloat16, "x")
    _require(weight, (rows, HIDDEN), torch.bfloat16, "weight")
    _require(out, (tokens, rows), torch.float32, "out")
    status = _library().antiphon_logits(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, rows, *_launch_options(x, pdl))
    )
    check_launch(status, "logits")
    return out
