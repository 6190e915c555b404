"""Rated figures of the GPUs that plans are made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """What floors are computed from; all per GPU."""

    name: str
    memory_bytes: float
    """What a process can allocate at all."""
    bytes_per_s: float
    """Rated memory bandwidth."""
    bf16_flops: float
    """Dense tensor-core operations a second, a multiply-add counted as two."""
    fp8_flops: float
    nvlink_bytes_per_s: float
    """One direction, to all peers of the node together."""


H200 = Gpu(
    name="NVIDIA H200",
    memory_bytes=139 * 2**30,
    bytes_per_s=4.8e12,
    bf16_flops=990e12,
    fp8_flops=1979e12,
    nvlink_bytes_per_s=450e9,
)
