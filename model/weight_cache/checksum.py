"""A checksum of a tensor's bytes, computed where the tensor is: on a GPU it costs next to nothing.

It finds damage (flipped bits, lost or exchanged blocks), not forgery. 64-bit words are summed with odd
weights, all arithmetic modulo 2^64: one changed word always shows, since odd numbers have inverses, and
several cancel with a chance of about 2^-64.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

_WORD_BYTES = 8
_ROW_WORDS = 1 << 17
_ROWS_AT_ONCE = 64
"""Scratch memory of a step: 64 MiB."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


def checksum(tensor: Tensor, name: str) -> Tensor:
    """Checksum of a contiguous tensor under a name.

    Args:
        tensor: any dtype and shape, on any device.
        name: what it is; the same bytes under another name, dtype or shape have another checksum.

    Returns:
        int64 scalar on the tensor's device; nothing waits for it here.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: only contiguous tensors have a checksum")
    flat = tensor.view(-1).view(torch.uint8)
    total = torch.full((), _seed(tensor, name), dtype=torch.int64, device=tensor.device)
    words = flat.numel() // _WORD_BYTES
    aligned = flat[: words * _WORD_BYTES].view(torch.int64)
    step = _ROW_WORDS * _ROWS_AT_ONCE
    for begin in range(0, words, step):
        total = total + _weighted(aligned[begin : begin + step], begin // _ROW_WORDS)
    rest = flat[words * _WORD_BYTES :]
    if len(rest):
        last = torch.nn.functional.pad(rest, (0, _WORD_BYTES - len(rest))).view(torch.int64)
        total = total + _weighted(last, words // _ROW_WORDS + 1)
    return total


def _weighted(words: Tensor, first_row: int) -> Tensor:
    """[n] int64 -> scalar; every row of _ROW_WORDS words has the same weights, times one of the row's own."""
    device = str(words.device)
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    sums = []
    if whole:
        rows = words[:whole].view(-1, _ROW_WORDS)
        sums.append((rows * _weights(_ROW_WORDS, device)).sum(dim=1))
    if whole < len(words):
        rest = words[whole:]
        sums.append((rest * _weights(_ROW_WORDS, device)[: len(rest)]).sum()[None])
    of_rows = torch.cat(sums)
    return (of_rows * _odd(torch.arange(len(of_rows), device=words.device) + first_row + 1)).sum()


@lru_cache(maxsize=16)
def _weights(count: int, device: str) -> Tensor:
    return _odd(torch.arange(count, device=device) + (1 << 40))


def _odd(numbers: Tensor) -> Tensor:
    """Different odd numbers for different numbers."""
    mixed = numbers * _GOLDEN
    return (mixed ^ (mixed >> 31)) | 1


def _seed(tensor: Tensor, name: str) -> int:
    said = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:8], "little", signed=True)
