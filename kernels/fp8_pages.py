"""Pages whose keys and values are e4m3 numbers, with a power-of-two scale for each token and kv head.

A head's part of a page is its keys [S, D] and its values [S, D], a byte each, then the exponents of the
scales of its keys [S] and of its values [S], a byte each: 2 S (D + 1) bytes. A scale belongs to one token, so
a token is written once and never again, whatever comes after it. Its exponent is the smallest with which the
largest of the D magnitudes is at most 448, the largest e4m3 number. Powers of two lose nothing against other
scales but part of one binade of the range, and a number times its scale is exact in bfloat16 (3 bits of
mantissa): a kernel may widen first or scale afterwards, and all agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
EXPONENT_BIAS = 127
MIN_EXPONENT = 1
MAX_EXPONENT = 190
"""Biased. Beyond 448 x 2^63 magnitudes saturate; kernels may then fold 2^60 into a scale."""
PAGE_MULTIPLE = 16
"""Positions of a page are a multiple of this, so that heads begin at multiples of 16 bytes."""


def head_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of one head of one layer of a page, keys and values."""
    return 2 * page_size * (head_dim + 1)


@dataclass(frozen=True, slots=True)
class Fp8Pages:
    """One layer's pages.

    Attributes:
        data: [N, G, 2 S (D + 1)] uint8 view; a page's heads are contiguous, pages may lie apart.
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
    def exponents(self) -> Tensor:
        """[N, G, 2, S] uint8 view: of the scales, biased by 127."""
        return self.data[:, :, 2 * self.page_size * self.head_dim :].view(self.shape[:-1])

    def write(self, key: Tensor, value: Tensor, page: Tensor, offset: Tensor) -> None:
        """Store [T, G, D] keys and values at pages and offsets [T] int64."""
        for half, numbers in enumerate((key, value)):
            codes, exponents = quantise(numbers)
            self.codes[page, :, half, offset] = codes
            self.exponents[page, :, half, offset] = exponents

    def widened(self, pages: Tensor) -> Tensor:
        """[P] int64 -> [P, G, 2, S, D] float32: what these pages hold."""
        return dequantise(self.codes[pages], self.exponents[pages])


KvLayer = Tensor | Fp8Pages
"""One layer's pages: [N, G, 2, S, D] as they are, or in FP8."""


def pages_of(layer: KvLayer) -> tuple[Tensor, int]:
    """A layer's memory, and how many of its elements lie from a page to the next: what a kernel is given."""
    data = layer.data if isinstance(layer, Fp8Pages) else layer
    return data, data.stride(0)


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> e4m3 bits [..., D] uint8, biased exponents of their scales [...] uint8.

    Rounds to nearest, ties to even. NaN stays NaN.
    """
    numbers = numbers.float()
    peak = numbers.abs().amax(-1)
    # Of the bits of m x 2^x (1 <= m < 2) the addition carries into the exponent where m > 1.75 = 448 / 2^8.
    exponent = ((peak.view(torch.int32) + 0x1FFFFF) >> 23) - 8
    exponent = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    scaled = (numbers * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponent.to(torch.uint8)


def dequantise(codes: Tensor, exponents: Tensor) -> Tensor:
    """e4m3 bits [..., D], biased exponents [...] -> [..., D] float32."""
    scale = (exponents.int() << 23).view(torch.float32)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scale[..., None]
