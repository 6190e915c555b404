"""Choosing tokens from logits spread over ranks: each rank chooses first, then few values are exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.model.parallel.communicator import Communicator


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
