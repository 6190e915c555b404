"""Pages whose keys and values are e4m3 numbers, with a bfloat16 scale for each token and kv head.

A head's part of a page is its keys [S, D] and its values [S, D], a byte each, then the scales of its keys [S]
and of its values [S], two bytes each: 2 S (D + 2) bytes. A scale belongs to one token, so a token is written
once and never again, whatever comes after it. It maps the largest of the D magnitudes to 448, the largest
e4m3 number, so that this one is kept to bfloat16's precision; ``docs/kv-precision.md`` compares other scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
MIN_SCALE = 2.0**-100
"""Of a token whose numbers are all (nearly) zero."""
PAGE_MULTIPLE = 16
"""Positions of a page are a multiple of this, so that heads begin at multiples of 16 bytes."""


def head_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of one head of one layer of a page, keys and values."""
    return 2 * page_size * (head_dim + 2)


@dataclass(frozen=True, slots=True)
class Fp8Pages:
    """One layer's pages.

    Attributes:
        data: [N, G, 2 S (D + 2)] uint8 view; a page's heads are contiguous, pages may lie apart.
        page_size: S, a multiple of 16.
        head_dim: D.

    Raises:
        ValueError: another shape, dtype or layout.
    """

    data: Tensor
    page_size: int
    head_dim: int

    def __post_init__(self) -> None:
        size = head_bytes(self.page_size, self.head_dim)
        right = self.data.dim() == 3 and self.data.shape[2] == size and self.data.dtype == torch.uint8
        if not right or self.data.stride()[1:] != (size, 1) or self.page_size % PAGE_MULTIPLE:
            raise ValueError(
                f"{tuple(self.data.shape)} {self.data.dtype}: expected uint8 [N, G, {size}] for pages of "
                f"{self.page_size} positions (a multiple of {PAGE_MULTIPLE}) and heads of {self.head_dim}"
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(N, G, 2, S, D), as of pages that are one tensor."""
        return self.data.shape[0], self.data.shape[1], 2, self.page_size, self.head_dim

    @property
    def codes(self) -> Tensor:
        """[N, G, 2, S, D] uint8 view: the e4m3 numbers' bits."""
        return self.data[:, :, : 2 * self.page_size * self.head_dim].view(self.shape)

    @property
    def scales(self) -> Tensor:
        """[N, G, 2, S] bfloat16 view."""
        return (
            self.data[:, :, 2 * self.page_size * self.head_dim :].view(torch.bfloat16).view(self.shape[:-1])
        )

    def write(self, key: Tensor, value: Tensor, page: Tensor, offset: Tensor) -> None:
        """Store [T, G, D] keys and values at pages and offsets [T] int64."""
        for half, numbers in enumerate((key, value)):
            codes, scales = quantise(numbers)
            self.codes[page, :, half, offset] = codes
            self.scales[page, :, half, offset] = scales

    def widened(self, pages: Tensor) -> Tensor:
        """[P] int64 -> [P, G, 2, S, D] float32: what these pages hold."""
        return dequantise(self.codes[pages], self.scales[pages])


KvLayer = Tensor | Fp8Pages
"""One layer's pages: [N, G, 2, S, D] as they are, or in FP8."""


def pages_of(layer: KvLayer) -> tuple[Tensor, int]:
    """A layer's memory, and how many of its elements lie from a page to the next: what a kernel is given."""
    data = layer.data if isinstance(layer, Fp8Pages) else layer
    return data, data.stride(0)


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> e4m3 bits [..., D] uint8, their scales [...] bfloat16.

    Rounds to nearest, ties to even. Where one number is NaN, so are the scale and all of them.
    """
    numbers = numbers.float()
    # Kernels do the same operations in float32, so that all write the same bytes.
    scales = (numbers.abs().amax(-1) * (1.0 / E4M3_MAX)).clamp_min(MIN_SCALE).bfloat16()
    scaled = (numbers * scales.float().reciprocal()[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """e4m3 bits [..., D], scales [...] -> [..., D] float32."""
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scales.float()[..., None]
