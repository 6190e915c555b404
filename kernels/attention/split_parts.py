"""What the splits of decode attention find, each for its keys, and the kernel that merges it, in Triton.

It is a launch of its own: a merge by the last program to finish took 3 to 11 us longer at batch 1, since one
warp then reads all parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_splits(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    out_ptr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one sequence: weigh the splits' parts by their maxima and add them up."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the projection behind fetches its weights meanwhile
        tl.extra.cuda.gdc_wait()
    split = tl.arange(0, BLOCK)
    inside = split < SPLITS
    part = row * SPLITS + split
    dims = tl.arange(0, DIM)
    acc = tl.load(part_acc_ptr + part[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
    maxima = tl.load(part_max_ptr + part, mask=inside, other=float("-inf"))
    weight = tl.exp2(maxima - tl.max(maxima, 0))
    total = tl.sum(tl.load(part_sum_ptr + part, mask=inside, other=0.0) * weight, 0)
    merged = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out_ptr + row * DIM + dims, merged.to(out_ptr.dtype.element_ty))


class SplitParts:
    """Scratch memory of one kernel's splits; safe to capture in a CUDA graph.

    Args:
        rows: query heads of all sequences.
        splits: parts of each row, part ``row * splits + split``; one alone is written to the output and takes
            no memory here.
        pdl: programmatic dependent launch.

    Attributes:
        acc: [rows * splits * D] float32, sums of values weighted relative to the part's maximum.
        max, sum: [rows * splits] float32, that maximum (of scores in log2) and the sum of weights.
    """

    def __init__(self, rows: int, head_dim: int, splits: int, device: torch.device, pdl: bool) -> None:
        self._rows, self._head_dim, self._splits, self._pdl = rows, head_dim, splits, pdl
        parts = rows * splits if splits > 1 else 0
        self.acc = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self.max = torch.empty(parts, dtype=torch.float32, device=device)
        self.sum = torch.empty(parts, dtype=torch.float32, device=device)

    def merge(self, out: Tensor) -> None:
        """Write out [B, Q, D]."""
        _merge_splits[(self._rows,)](
            self.acc,
            self.max,
            self.sum,
            out,
            DIM=self._head_dim,
            SPLITS=self._splits,
            BLOCK=triton.next_power_of_2(self._splits),
            PDL=self._pdl,
            num_warps=2,
            **launch_options(self._pdl),
        )


def launch_options(pdl: bool) -> dict[str, Any]:
    """Of a Triton launch."""
    return {"launch_pdl": True} if pdl else {}
