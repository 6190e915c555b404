"""One kernel again and again, back to back: a race shows itself by launches of the same inputs that differ.

Tests that launch once or twice and hold what comes out to a bound pass what a race spoils now and then.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

LAUNCHES = 100
COPY_BYTES, COPIES = 256 << 20, 2
"""For each launch: on an H200 they take about as long as the longest ones here."""

alone_and_beside_copies = pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside copies"])
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_launches(launch: Callable[..., object], *initial: Tensor, beside: bool = False) -> None:
    """Every launch of the same inputs must leave the same bits.

    Two inputs take turns: what a launch leaves in buffers that the next one uses is wrong for that one.

    Args:
        launch: given 0 or 1, which inputs, and an output like each of ``initial``, which it overwrites.
        initial: what outputs hold before, such as a residual stream.
        beside: another stream copies from one part of the device's memory to another meanwhile.
    """
    outs = [each.expand(LAUNCHES, *each.shape).contiguous() for each in initial]
    other = torch.cuda.Stream()
    blocks = torch.zeros(2, COPY_BYTES if beside else 0, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for index in range(LAUNCHES):
        with torch.cuda.stream(other):
            for _ in range(COPIES if beside else 0):
                blocks[0].copy_(blocks[1])
        launch(index % 2, *(out[index] for out in outs))
    torch.cuda.synchronize()
    for out in outs:
        compare_launches(out)


def compare_launches(outs: Tensor) -> None:
    """[launches, ...]: those of either inputs must be the same, and those of both not."""
    pairs = outs.view(_WORDS[outs.element_size()]).view(len(outs) // 2, 2, -1)
    apart = (pairs != pairs[0]).any(-1).flatten().nonzero().flatten()
    assert not len(apart), (len(apart), apart[:8].tolist())
    assert not torch.equal(*pairs[0]), "two inputs, one output"
