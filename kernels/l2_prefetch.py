"""Weights that a launch has L2 fetch for the launches behind it, while memory would be idle."""

from __future__ import annotations

from torch import Tensor

MAX_BYTES = 32 << 20
"""Of a larger matrix only the beginning is fetched: L2 holds 60 MB, and what comes between needs room."""


def prefetch_arguments(weights: Tensor | None) -> tuple[int | None, int]:
    """Address and bytes for a launcher; (None, 0) fetches nothing."""
    if weights is None:
        return None, 0
    return weights.data_ptr(), min(weights.nbytes, MAX_BYTES) // 16 * 16
