"""Choosing tokens from logits spread over ranks: each rank chooses first, then few values are exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.rank_sampling import BLOCK, best_tokens, block_sums, blocks_of, drawn_tokens
from antiphon.kernels.sampling import best_of_parts
from antiphon.model.parallel.communicator import Communicator

_LARGEST_SCALE = 1e30
"""Bound of 1 / temperature: any difference of two logits times it is beyond exp's range, yet finite."""


def argmax_over_ranks(logits: Tensor, first_id: int, communicator: Communicator) -> Tensor:
    """The lowest id among the highest logits of each row; a NaN counts as highest.

    Args:
        logits: [M, V / ranks], this rank's columns.
        first_id: token id of its first column; ids ascend with ranks.

    Returns:
        [M] int64, the same on every rank.
    """
    values, ids = _first_highest(logits)
    both = communicator.all_gather(_pack(values[:, None], ids[:, None] + first_id))
    values, ids = _unpack(both.squeeze(2).transpose(0, 1))  # [M, ranks]
    _, rank = _first_highest(values)
    return ids.gather(1, rank[:, None]).squeeze(1)


def choose_over_ranks(
    logits: Tensor, first_id: int, communicator: Communicator, draws: Tensor | None = None
) -> Tensor:
    """One token per row, greedy or drawn from the whole vocabulary in the order of ids.

    What is exchanged of a row is each rank's best token, then, for a draw, the sums of the weights of blocks
    of ids, then the drawn id: a few kilobytes instead of its logits. On a GPU a launch of one kernel stands
    before and behind each exchange, and nothing waits for the host.

    Args:
        logits: [M, V / ranks] float32 contiguous, this rank's columns.
        first_id: token id of its first column; ids ascend with ranks.
        draws: [2, M] float64, 1 / temperature, 0 of a greedy row, and a number in [0, 1) for each row;
            absent, all are greedy.

    Returns:
        [M, 2] float64, the same on every rank: the token, and 0 or, where the best logit is not finite, 1.
        As of ``kernels.sampling.choose_tokens``: of equal logits the lowest id is the best, a NaN counts as
        highest, a token of weight zero is never drawn, and what is chosen is a valid id whatever the logits.
    """
    choose = choose_by_kernels if logits.is_cuda else choose_by_torch
    return choose(logits, first_id, communicator, draws)


def choose_by_kernels(
    logits: Tensor, first_id: int, communicator: Communicator, draws: Tensor | None = None
) -> Tensor:
    """``choose_over_ranks`` on a GPU, or in Triton's interpreter."""
    parts = communicator.all_gather(best_of_parts(logits, first_id))
    if draws is None:
        return best_tokens(parts)
    inverse_temperatures, uniforms = draws
    sums = communicator.all_gather(block_sums(logits, parts, inverse_temperatures))
    share = drawn_tokens(*(logits, first_id, communicator.rank, parts, sums), inverse_temperatures, uniforms)
    return communicator.all_reduce(share)


def choose_by_torch(
    logits: Tensor, first_id: int, communicator: Communicator, draws: Tensor | None = None
) -> Tensor:
    """``choose_over_ranks`` on any device, by torch's own operations."""
    values, ids = _first_highest(logits)
    everyone = communicator.all_gather(_pack(values[:, None], ids[:, None] + first_id))
    values, ids = _unpack(everyone.squeeze(2).transpose(0, 1))  # [M, ranks]
    best, rank = _first_highest(values)
    tokens = ids.gather(1, rank[:, None]).squeeze(1)
    if draws is not None:
        drawn = _draw_over_ranks(logits, best.float(), first_id, communicator, draws)
        tokens = torch.where(draws[0] > 0, drawn, tokens)
    return torch.stack((tokens.double(), torch.logical_not(torch.isfinite(best)).double()), dim=-1)


def _draw_over_ranks(
    logits: Tensor, best: Tensor, first_id: int, communicator: Communicator, draws: Tensor
) -> Tensor:
    """[M] int64: the first id whose cumulative weight exceeds its row's share of the whole."""
    rows, width = logits.shape
    inverse_temperature, uniform = draws[0], draws[1][:, None]
    scale = inverse_temperature.clamp_max(_LARGEST_SCALE).float()
    weights = torch.exp((logits - best[:, None]) * scale[:, None])
    here = blocks_of(width)
    blocks = torch.nn.functional.pad(weights, (0, here * BLOCK - width)).view(rows, here, BLOCK)
    sums = communicator.all_gather(blocks.sum(dim=-1, dtype=torch.float64))  # [ranks, M, blocks of a rank]
    ends = sums.transpose(0, 1).reshape(rows, -1).cumsum(dim=-1)
    totals = ends[:, -1:]
    target = torch.minimum(uniform * totals, _just_below(totals))
    block = _first_beyond(ends, target)
    before = ends.gather(-1, (block - 1).clamp_min(0)).masked_fill(block == 0, 0.0)
    # Every rank looks into a block of its own; that of the rank that holds the drawn one counts.
    mine = block.div(here, rounding_mode="floor") == communicator.rank
    within = (block - communicator.rank * here).clamp(0, here - 1)
    inside = blocks.gather(1, within[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)
    inner = inside.cumsum(dim=-1, dtype=torch.float64)
    rest = torch.minimum(target - before, _just_below(inner[:, -1:]))
    ids = first_id + (within * BLOCK + _first_beyond(inner, rest)).clamp_max(width - 1)
    return communicator.all_reduce(torch.where(mine, ids, 0)).squeeze(-1)


def top_k_over_ranks(
    logits: Tensor, first_id: int, k: int, communicator: Communicator
) -> tuple[Tensor, Tensor]:
    """The k best logits of each row, by falling logit and then rising id.

    Which of several equal logits make the cut, if they lie on both sides of it, is not specified.

    Args:
        logits: [M, V / ranks], this rank's columns.
        first_id: token id of its first column.
        k: at most the vocabulary.

    Returns:
        values [M, k] float32 and ids [M, k] int64, the same on every rank.

    Raises:
        ValueError: k is not within 1 and the vocabulary.
    """
    rows, width = logits.shape
    if not 1 <= k <= width * communicator.size:
        raise ValueError(f"k {k} is not within 1 .. {width * communicator.size}")
    mine = torch.topk(logits, min(k, width), dim=-1, sorted=False)
    both = communicator.all_gather(_pack(mine.values, mine.indices + first_id))
    values, ids = _unpack(both.transpose(0, 1).reshape(rows, -1, 2))
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values[:, :k].float(), ids.gather(1, best[:, :k])


def _just_below(totals: Tensor) -> Tensor:
    return torch.nextafter(totals, torch.zeros_like(totals))


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds the target, [M, C], [M, 1] -> [M, 1]; within bounds."""
    return torch.searchsorted(cumulative, target, right=True).clamp_max(cumulative.shape[-1] - 1)


def _first_highest(values: Tensor) -> tuple[Tensor, Tensor]:
    """[M, N] -> the highest value of each row [M] and the first index that holds it [M]; NaN is highest."""
    highest = values.amax(dim=-1, keepdim=True)  # a NaN wins
    holds = (values == highest) | values.isnan()
    index = torch.arange(values.shape[1], device=values.device)
    return highest.squeeze(1), torch.where(holds, index, values.shape[1]).amin(dim=-1)


def _pack(values: Tensor, ids: Tensor) -> Tensor:
    """[M, N] each -> [M, N, 2] float64, which holds every float32 and every token id exactly."""
    return torch.stack((values.double(), ids.double()), dim=-1)


def _unpack(both: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2] -> values [...] float64, ids [...] int64."""
    return both[..., 0], both[..., 1].long()
