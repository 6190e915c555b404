"""What each rank launches to choose tokens where ranks hold the logits of consecutive ids, in Triton.

Of three launches ``kernels.sampling`` has the first, ``best_of_parts``. Behind each stands a collective of
``model.parallel.vocabulary.choose_over_ranks``, which also says what is chosen. No launch only arranges what
was exchanged: the next one reads it as it was gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.sampling import (
    best_id,
    best_value,
    draw_block,
    draw_within,
    not_finite,
    row_best,
    sums_of_blocks,
    weight_scale,
    weights_of,
)

BLOCK = 1024
"""Ids of a rank whose weights are summed before they are exchanged; a rank's last block may have fewer."""


def blocks_of(width: int) -> int:
    """Blocks of a rank that holds so many logits of a row."""
    return -(-width // BLOCK)


@triton.jit(
    do_not_specialize=["first_id", "this_rank"],
    do_not_specialize_on_alignment=["inverse_temperature_ptr", "uniform_ptr"],
)
def _finish_of_rank(
    logits_ptr,
    part_ptr,
    inverse_temperature_ptr,
    uniform_ptr,
    sum_ptr,
    out_ptr,
    first_id,
    this_rank,
    V,
    BLOCKS,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    DRAW: tl.constexpr,
):
    """The token of one row; where any row is drawn, zeros on all ranks but one."""
    row = tl.program_id(0).to(tl.int64)
    packed = row_best(part_ptr, row, PARTS, RANKS)
    best = best_value(packed)
    token = best_id(packed)
    status = not_finite(best)
    if DRAW:
        index = tl.arange(0, MOST_BLOCKS)
        row_of_rank = index // BLOCKS * tl.num_programs(0).to(tl.int64) + row
        count = RANKS * BLOCKS
        sums = tl.load(sum_ptr + row_of_rank * BLOCKS + index % BLOCKS, mask=index < count, other=0.0)
        block, rest = draw_block(sums, tl.load(uniform_ptr + row), index, count)
        here = block - this_rank * BLOCKS
        holds = block // BLOCKS == this_rank
        within = tl.arange(0, BLOCK)
        ids = here * BLOCK + within
        inside = holds & (ids < V)
        logits = tl.load(logits_ptr + row * V + ids, mask=inside, other=float("-inf"))
        weights = tl.where(inside, weights_of(logits, best, weight_scale(inverse_temperature_ptr, row)), 0.0)
        drawn = here * BLOCK + draw_within(weights, rest, within, tl.minimum(BLOCK, V - here * BLOCK))
        token = tl.where(tl.load(inverse_temperature_ptr + row) > 0, (first_id + drawn).to(tl.int64), token)
        # A greedy row is said by the one rank that would hold its draw.
        token = tl.where(holds, token, 0)
        status = tl.where(holds, status, 0.0)
    tl.store(out_ptr + row * 2, token.to(tl.float64))
    tl.store(out_ptr + row * 2 + 1, status)


def block_sums(logits: Tensor, parts: Tensor, inverse_temperatures: Tensor) -> Tensor:
    """What is gathered to know in which block a row's draw lies.

    Args:
        logits: [M, V / ranks] float32 contiguous.
        parts: [ranks, M, parts] int64, what was gathered of ``best_of_parts``.
        inverse_temperatures: [M] float64.

    Returns:
        [M, blocks] float64: the sum of the weights of each block of this rank's ids.
    """
    return sums_of_blocks(logits, parts, inverse_temperatures, BLOCK, 1)


def best_tokens(parts: Tensor) -> Tensor:
    """The last launch where no row is drawn.

    Args:
        parts: [ranks, M, parts] int64, what was gathered of ``best_of_parts``.

    Returns:
        [M, 2] float64: each row's best token, and 0 or, where its logit is not finite, 1.
    """
    ranks, rows, each = parts.shape
    out = torch.empty(rows, 2, dtype=torch.float64, device=parts.device)
    _finish_of_rank[(rows,)](
        *(None, parts, None, None, None, out, 0, 0, 0, 0),
        PARTS=each,
        RANKS=ranks,
        BLOCK=BLOCK,
        MOST_BLOCKS=1,
        DRAW=False,
        num_warps=1,
    )
    return out


def drawn_tokens(
    logits: Tensor,
    first_id: int,
    rank: int,
    parts: Tensor,
    sums: Tensor,
    inverse_temperatures: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """The last launch of draws: this rank's share of the result, whose sum over ranks is the result.

    Args:
        logits: [M, V / ranks] float32 contiguous.
        first_id: token id of the first column.
        rank: this one.
        parts: [ranks, M, parts] int64, what was gathered of ``best_of_parts``.
        sums: [ranks, M, blocks] float64, what was gathered of ``block_sums``.
        inverse_temperatures: [M] float64, 0 of a greedy row.
        uniforms: [M] float64 in [0, 1).

    Returns:
        [M, 2] float64: of each row on one of the ranks the token, and 0 or, where the best logit is not
        finite, 1; zeros on all others.
    """
    rows, width = logits.shape
    ranks, blocks = sums.shape[0], sums.shape[2]
    out = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    _finish_of_rank[(rows,)](
        *(logits, parts, inverse_temperatures, uniforms, sums, out, first_id, rank, width, blocks),
        PARTS=parts.shape[2],
        RANKS=ranks,
        BLOCK=BLOCK,
        MOST_BLOCKS=triton.next_power_of_2(ranks * blocks),
        DRAW=True,
        num_warps=8,
    )
    return out
