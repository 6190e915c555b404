"""The CUDA libraries of the MoE kernels and their launchers, typed.

Kernels for experts that ranks hold columns of lie in a library of their own, beside the one that everybody
needs: who has whole experts need not wait for its build.

The launchers are plain C functions that take device pointers and a stream and return a CUDA error code; no
torch header is compiled, so the library serves any torch version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from antiphon.kernels.cuda_library import CudaLibrary

_SOURCES = Path(__file__).with_name("csrc")
_HEADERS = tuple(sorted(_SOURCES.glob("*.cuh")))
LIBRARY = CudaLibrary("moe", sources=tuple(sorted(_SOURCES.glob("*.cu"))), headers=_HEADERS)
SPLIT_LIBRARY = CudaLibrary(
    "moe_split", sources=tuple(sorted(_SOURCES.joinpath("split").glob("*.cu"))), headers=_HEADERS
)
"""Both projections of experts that are split over ranks; the rest of their launches are in ``LIBRARY``."""

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    # x, activations, scale, tokens, token_tile, overlap, stream
    "antiphon_moe_split": (*(_POINTER,) * 3, *(_NUMBER,) * 3, _POINTER),
    # gate_up, gate_up_bias, down, down_bias, activations, scale, order, tiles, tile_count, ready, hidden,
    # pair_weight, partial, max_tiles, token_tile, grid, overlap, stream
    "antiphon_moe_experts": (*(_POINTER,) * 13, *(_NUMBER,) * 4, _POINTER),
    # ids, pairs, order, tiles, tile_count, ready, first_expert, experts, token_tile, overlap, stream
    "antiphon_moe_group": (_POINTER, _NUMBER, *(_POINTER,) * 4, *(_NUMBER,) * 4, _POINTER),
    # x, norm, eps, weight, bias, logits, ids, weights, activations, scale, tickets, tokens, all_experts,
    # order, tiles, tile_count, ready, first_expert, experts, token_tile, overlap, stream
    "antiphon_moe_route": (
        *(_POINTER, _POINTER, _REAL, *(_POINTER,) * 8, _NUMBER, _NUMBER, *(_POINTER,) * 4),
        *(*(_NUMBER,) * 4, _POINTER),
    ),
    # partial, ids, out, tokens, first_expert, experts, overlap, stream
    "antiphon_moe_combine": (*(_POINTER,) * 3, *(_NUMBER,) * 4, _POINTER),
    # partial, ids, residual, norm, out, new_residual, eps, tokens, first_expert, experts, overlap, stream
    "antiphon_moe_combine_norm": (*(_POINTER,) * 6, _REAL, *(_NUMBER,) * 4, _POINTER),
    # ids, rank, counts, first_tile, tiles, tile_count, ticket, pairs, first_expert, experts, tile_rows,
    # stream
    "antiphon_moe_fp8_rank": (*(_POINTER,) * 7, *(_NUMBER,) * 4, _POINTER),
    # x, weight, bias, live, partial, ids, weights, rank, counts, first_tile, tiles, tile_count, group_counts,
    # tickets, tokens, all_experts, first_expert, experts, tile_rows, overlap, stream
    "antiphon_moe_chunk_route": (*(_POINTER,) * 14, *(_NUMBER,) * 6, _POINTER),
    # x, ids, expert_weights, rank, first_tile, activations, row_weight, slots, tokens, first_expert, experts,
    # tile_rows, stream
    "antiphon_moe_fp8_quantise": (*(_POINTER,) * 8, *(_NUMBER,) * 4, _POINTER),
    # activations, weights, weight_scales, bias, tiles, tile_count, hidden, tile_rows, grid, stream
    "antiphon_moe_fp8_gate_up": (*(_POINTER,) * 7, *(_NUMBER,) * 2, _POINTER),
    # hidden, weights, weight_scales, bias, tiles, tile_count, row_weight, rows, tile_rows, grid, stream
    "antiphon_moe_fp8_down": (*(_POINTER,) * 8, *(_NUMBER,) * 2, _POINTER),
    # x, activations, weights, weight_scales, bias, out, tokens, columns, rows, tile_rows, grid, stream
    "antiphon_moe_fp8_project": (*(_POINTER,) * 6, *(_NUMBER,) * 5, _POINTER),
    # rows, slots, out, tokens, stream
    "antiphon_moe_fp8_combine": (*(_POINTER,) * 3, _NUMBER, _POINTER),
    # rows, slots, residual, norm, out, eps, tokens, stream
    "antiphon_moe_chunk_combine_norm": (*(_POINTER,) * 5, _REAL, _NUMBER, _POINTER),
    # delta, residual, norm, out, eps, tokens, stream
    "antiphon_moe_chunk_add_norm": (*(_POINTER,) * 4, _REAL, _NUMBER, _POINTER),
    # x, ids, expert_weights, rank, first_tile, activations, token_scale, row_weight, slots, tokens,
    # first_expert, experts, tile_rows, overlap, stream
    "antiphon_moe_mixed_quantise": (*(_POINTER,) * 9, *(_NUMBER,) * 5, _POINTER),
    # activations, gate_up, gate_up_tops, gate_up_bias, down, down_tops, down_bias, tiles, tile_count, ready,
    # token_scale, row_weight, hidden, rows, tile_rows, grid, overlap, stream
    "antiphon_moe_mixed_experts": (*(_POINTER,) * 14, *(_NUMBER,) * 3, _POINTER),
}
_SPLIT_SIGNATURES: dict[str, tuple[type, ...]] = {
    # gate_up, gate_up_bias, down, down_bias, activations, scale, order, tiles, tile_count, ready, hidden,
    # pair_weight, partial, max_tiles, hidden_columns, token_tile, grid, overlap, stream
    "antiphon_moe_split_experts": (*(_POINTER,) * 13, *(_NUMBER,) * 5, _POINTER),
    # activations, gate_up, gate_up_tops, gate_up_bias, down, down_tops, down_bias, tiles, tile_count, ready,
    # token_scale, row_weight, hidden, rows, hidden_columns, tile_rows, grid, stream
    "antiphon_moe_split_mixed_experts": (*(_POINTER,) * 14, *(_NUMBER,) * 3, _POINTER),
}


def _load(library: CudaLibrary, signatures: dict[str, tuple[type, ...]]) -> ctypes.CDLL:
    loaded = library.load()
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
    return loaded


@cache
def _split_library() -> ctypes.CDLL:
    return _load(SPLIT_LIBRARY, _SPLIT_SIGNATURES)


@cache
def _library() -> ctypes.CDLL:
    library = _load(LIBRARY, _SIGNATURES)
    library.antiphon_moe_error.argtypes = [ctypes.c_int]
    library.antiphon_moe_error.restype = ctypes.c_char_p
    return library


@cache
def _launcher(name: str) -> Callable[..., int]:
    """One function of a library; found once, since a chunk of a prompt makes hundreds of launches."""
    full = f"antiphon_moe_{name}"
    function: Callable[..., int] = getattr(
        _split_library() if full in _SPLIT_SIGNATURES else _library(), full
    )
    return function


def launch(name: str, *arguments: int | float | None) -> None:
    """Launch ``antiphon_moe_<name>`` on torch's current stream, which is appended to the arguments.

    Raises:
        KernelLibraryError: the library was not built.
        RuntimeError: CUDA refused the launch; names the kernel and the reason.
    """
    status = _launcher(name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if status != 0:
        raise RuntimeError(f"moe {name}: {_library().antiphon_moe_error(status).decode()}")
