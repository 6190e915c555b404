"""The expert router in Triton: logits, top-k and softmax over those k, in one launch, for any T."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 64


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["live_ptr"])
def _route(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    live_ptr,
    tokens,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PADDED: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < tokens
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for k in range(0, H, 64):
        column = k + tl.arange(0, 64)
        x = tl.load(
            x_ptr + t[:, None].to(tl.int64) * H + column[None, :],
            mask=live[:, None] & (column < H)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight_ptr + e[:, None] * H + column[None, :],
            mask=inside[:, None] & (column < H)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(w), acc)
    logits = acc + tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(inside[None, :], logits, float("-inf"))
    best = tl.max(logits, 1)
    total = tl.zeros([BLOCK_T], tl.float32)
    rest = logits
    for _ in tl.static_range(K):
        value = tl.max(rest, 1)
        choice = tl.min(tl.where(rest == value[:, None], e[None, :], BLOCK_E), 1)
        total += tl.exp(value - best)
        rest = tl.where(e[None, :] == choice[:, None], float("-inf"), rest)
    rest = logits
    for k in tl.static_range(K):
        value = tl.max(rest, 1)
        choice = tl.min(tl.where(rest == value[:, None], e[None, :], BLOCK_E), 1)
        rest = tl.where(e[None, :] == choice[:, None], float("-inf"), rest)
        # A row of NaN chooses nothing; expert 0 keeps the ids in range, and its weight stays NaN.
        choice = tl.where(choice < E, choice, 0)
        if PADDED:
            choice = tl.where(t < tl.load(live_ptr), choice, -1)
        tl.store(ids_ptr + t * K + k, choice.to(tl.int64), mask=live)
        probability = tl.exp(value - best) / total
        tl.store(weights_ptr + t * K + k, probability.to(weights_ptr.dtype.element_ty), mask=live)


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fast twin of ``reference.route``: products of the inputs as they are, sums in float32.

    Args:
        x: [T, H] contiguous; weight: [E, H]; bias: [E].
        live: [1] int32, tokens that are not padding: those behind them get the ids -1. None: all.

    Returns:
        expert_ids [T, K] int64, best first (the lowest id among equals), expert_weights [T, K] in x's dtype.
    """
    tokens, hidden = x.shape
    experts = weight.shape[0]
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=x.dtype, device=x.device)
    block = 32 if tokens > 2048 else 16
    _route[(triton.cdiv(tokens, block),)](
        *(x, weight, bias, ids, weights, bias if live is None else live, tokens),
        H=hidden,
        E=experts,
        K=top_k,
        BLOCK_T=block,
        BLOCK_E=max(16, triton.next_power_of_2(experts)),
        PADDED=live is not None,
    )
    return ids, weights
