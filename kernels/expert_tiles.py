"""Groups the (token, choice) pairs of a step by expert, on the device, without a host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A = T * K pairs in expert order, cut into tiles of at most ``block`` pairs of one expert.

    Attributes:
        pair: [A] int32, pair index t * K + k in expert order (within an expert, ascending).
        row_end: [E] int32, end of each expert's run in ``pair``.
        expert: [tiles] int32, the tile's expert, -1 for a tile that is not used.
        start: [tiles] int32, the tile's first index into ``pair``.
        block: pairs per tile.
    """

    pair: Tensor
    row_end: Tensor
    expert: Tensor
    start: Tensor
    block: int


def group_by_expert(expert_ids: Tensor, num_experts: int, block: int) -> ExpertTiles:
    """[T, K] int64 -> tiles; their number depends only on the shapes, so a graph can capture it."""
    flat = expert_ids.reshape(-1)
    pairs = flat.shape[0]
    pair = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    row_end = counts.cumsum(0)
    tiles = (counts + block - 1) // block
    tile_end = tiles.cumsum(0)
    index = torch.arange(min(num_experts, pairs) + pairs // block, device=flat.device)
    expert = torch.searchsorted(tile_end, index, right=True)
    safe = expert.clamp(max=num_experts - 1)
    start = row_end[safe] - counts[safe] + (index - tile_end[safe] + tiles[safe]) * block
    return ExpertTiles(
        pair.int(), row_end.int(), torch.where(expert < num_experts, expert, -1).int(), start.int(), block
    )
