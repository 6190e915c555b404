"""Which tokens may be chosen in the rows of a step that a grammar constrains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of one step.

    Attributes:
        rows: [n] int64, the rows that are constrained.
        bits: [n, words] int32 for a vocabulary of up to 32 * words: bit ``id % 32`` of word ``id // 32`` is
            set where a token may be chosen. Every row has one that is.
        errors: by row, why its grammar cannot go on; what such a row chooses is not to be used.
    """

    rows: np.ndarray
    bits: np.ndarray
    errors: dict[int, str]


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Logits with what the masks do not allow at minus infinity, [M, V]; ``logits`` is not changed.

    Args:
        logits: [M, V] float32. rows: [n] int64, all different. bits: [n, words] int32, on the same device.
    """
    vocabulary = logits.shape[-1]
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    # A little-endian word is its bytes in order, so that bit b of byte i belongs to token 8 * i + b.
    allowed = (bits.view(torch.uint8)[:, :, None] & powers) != 0
    part = logits.index_select(0, rows)
    part = part.masked_fill_(~allowed.view(len(bits), -1)[:, :vocabulary], float("-inf"))
    return logits.index_copy(0, rows, part)
