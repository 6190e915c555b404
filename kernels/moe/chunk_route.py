"""The router of a chunk and the ranks of its pairs within experts, in one launch on sm_90.

Takes the place of ``kernels.router.route`` and of the ranking launch of ``moe.mixed`` or ``moe.prefill``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.moe import mixed
from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.expert_range import MAX_EXPERTS, TOP_K
from antiphon.kernels.moe.mixed import MixedWorkspace
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.streamed import DIM

GROUP = 32
"""Tokens whose pairs are counted together; four blocks compute their logits."""
FASTER_TOKENS = 1024
"""Up to so many tokens this launch is taken for both others.

Each group reads all of the router's weights, and one block places the pairs of all. Measured on one H200, us
of both others and of this one at 1,024, 2,048 and 8,192 tokens: gpt-oss-20b 23.5 and 14.9, 23.9 and 25.7,
39.1 and 85.9; -120b 34.1 and 17.4, 34.5 and 32.0, 51.2 and 118.1.
"""


class RouteScratch:
    """What groups of tokens leave for the last one; layers use it in turn, on one stream.

    Args:
        max_tokens: largest chunk.
        experts: of this rank.
    """

    def __init__(self, max_tokens: int, experts: int, device: torch.device) -> None:
        groups = -(-max_tokens // GROUP)
        self.max_tokens, self.experts = max_tokens, experts
        self.counts = torch.empty(groups, experts, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(1 + groups, dtype=torch.int32, device=device)


def route_ranked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    workspace: MixedWorkspace | Fp8Workspace,
    scratch: RouteScratch,
    tile: int,
    live: Tensor | None = None,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """``router.route`` for four experts a token, then the ranks and tiles of its pairs in the workspace.

    A logit is the sum of sixteen parts of the columns, each added up in float32 by the tensor core: as
    exact as the other router's, and not the same bits. The same inputs leave the same bits, and a token's
    logits do not depend on the chunk around it.

    Args:
        x: [T, 2880] bf16; weight: [E, 2880] bf16; bias: [E] bf16; all contiguous.
        workspace: what the experts run with next. Its rows hold parts of logits meanwhile.
        tile: tokens of a tile, as the experts will have it.
        live: [1] int32, tokens that are not padding: those behind them get the ids -1. None: all.
        overlap: the launch may begin while the one ahead ends.

    Returns:
        expert_ids [T, 4] int64, best first (the lowest id among equals), expert_weights [T, 4] bf16.

    Raises:
        ValueError: another shape, dtype or tile, an odd number of experts or more than 128, or buffers for
            others.
    """
    tokens, all_experts = x.shape[0], weight.shape[0]
    _check_arguments(x, weight, bias, workspace, scratch, live)
    _check_tile(workspace, tile)
    ids = torch.empty(tokens, TOP_K, dtype=torch.int64, device=x.device)
    weights = torch.empty(tokens, TOP_K, dtype=x.dtype, device=x.device)
    launch(
        "chunk_route",
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), None if live is None else live.data_ptr()),
        *(workspace.rows.data_ptr(), ids.data_ptr(), weights.data_ptr(), workspace.rank.data_ptr()),
        *(workspace.counts.data_ptr(), workspace.first_tile.data_ptr(), workspace.tiles.data_ptr()),
        *(workspace.tile_count.data_ptr(), scratch.counts.data_ptr(), scratch.tickets.data_ptr()),
        *(tokens, all_experts, workspace.first_expert, workspace.experts, tile, int(overlap)),
    )
    return ids, weights


def _check_tile(workspace: MixedWorkspace | Fp8Workspace, tile: int) -> None:
    built = (workspace.tile,) if isinstance(workspace, Fp8Workspace) else mixed.TILES
    if tile not in built:
        raise ValueError(f"tiles of {tile} tokens, expected one of {built}")


def _check_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    workspace: MixedWorkspace | Fp8Workspace,
    scratch: RouteScratch,
    live: Tensor | None,
) -> None:
    tokens, experts = x.shape[0], weight.shape[0]
    most = min(workspace.max_tokens, scratch.max_tokens)
    if not 1 <= tokens <= most:
        raise ValueError(f"{tokens} tokens, the buffers hold 1 to {most}")
    if scratch.experts != workspace.experts:
        raise ValueError(f"counts of {scratch.experts} experts, the workspace is for {workspace.experts}")
    if experts % 2 or not TOP_K <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts, expected an even number from {TOP_K} to {MAX_EXPERTS}")
    if workspace.first_expert + workspace.experts > experts:
        raise ValueError(f"{experts} experts, the workspace is for some beyond them")
    for name, tensor, shape, dtype in (
        ("x", x, (tokens, DIM), torch.bfloat16),
        ("weight", weight, (experts, DIM), torch.bfloat16),
        ("bias", bias, (experts,), torch.bfloat16),
        ("live", torch.empty(1, dtype=torch.int32) if live is None else live, (1,), torch.int32),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous {shape} {dtype}"
            )
