"""The residual add and the next RMSNorm behind the projections of a chunk, for hidden size 2880."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.streamed import DIM


def add_rms_norm_(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += delta`` in place, then its RMSNorm, which is returned.

    Args:
        delta, residual: [T, 2880] bf16. weight: [2880] bf16.

    Raises:
        ValueError: another shape, dtype or layout.
    """
    _check(delta, residual, weight)
    out = torch.empty_like(residual)
    launch(
        "chunk_add_norm",
        *(delta.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), eps, residual.shape[0]),
    )
    return out


def combine_rms_norm_(rows: Tensor, slots: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual +=`` the sum of each token's expert outputs in place, then its RMSNorm, which is returned.

    Args:
        rows: [slots, 2880] bf16, weighted outputs. slots: [T * 4] int32, row of each (token, k), or negative.
        residual: [T, 2880] bf16. weight: [2880] bf16.

    Raises:
        ValueError: another shape, dtype or layout.
    """
    _check(residual, residual, weight)
    if tuple(rows.shape[1:]) != (DIM,) or rows.dtype != torch.bfloat16:
        raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}, expected bfloat16 [slots, {DIM}]")
    if slots.dtype != torch.int32 or slots.numel() < 4 * residual.shape[0]:
        raise ValueError(f"slots {tuple(slots.shape)} {slots.dtype} for {residual.shape[0]} tokens")
    out = torch.empty_like(residual)
    launch(
        "chunk_combine_norm",
        *(rows.data_ptr(), slots.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(eps, residual.shape[0]),
    )
    return out


def _check(delta: Tensor, residual: Tensor, weight: Tensor) -> None:
    for name, tensor, shape in (
        ("residual", residual, (residual.shape[0], DIM)),
        ("addend", delta, (residual.shape[0], DIM)),
        ("weight", weight, (DIM,)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous bfloat16 {shape}"
            )
