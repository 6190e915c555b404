"""Token ids as the engine keeps them: 64-bit numbers in a row, which numpy and hashes read as they are.

A tuple of a thousand numbers costs ten microseconds whenever somebody reads it, and a prompt is read at the
door, for its chunks and for its page keys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np


def token_array(*parts: Sequence[int]) -> array[int]:
    """The ids of all parts behind one another, in memory of their own.

    Raises:
        struct.error: one is no whole number of 64 bits.
    """
    ids = array("q")
    for part in parts:
        ids.frombytes(struct.pack(f"{len(part)}q", *part))  # three times as fast as the array's constructor
    return ids


def bounds(token_ids: array[int]) -> tuple[int, int]:
    """The smallest and the largest id; zeros where there is none."""
    if not token_ids:
        return 0, 0
    ids = np.frombuffer(token_ids, dtype=np.int64)
    return int(ids.min()), int(ids.max())
