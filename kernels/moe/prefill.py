"""The MoE of a long chunk on sm_90: e4m3 weights in 128 x 128 tiles, e4m3 activations, float32 sums.

Five launches: rank the pairs within their experts, quantise the activations into tiles of tokens, gate/up
with bias and SwiGLU whose output is already the second operand, down with bias and routing weight, combine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.chunk_norm import combine_rms_norm_
from antiphon.kernels.moe.expert_range import TOP_K, held_experts
from antiphon.kernels.moe.fp8_weights import TILE, TILES_K, Fp8Experts
from antiphon.kernels.moe.streamed import DIM

TILES = (128, 256)
"""Tokens of a tile that the kernels are built for."""
MEASURED_TILE = 256
"""What has been measured, and is taken unless a tile is named."""


class Fp8Workspace:
    """Buffers of one layer's launches; layers use the same ones in turn, on one stream.

    Args:
        max_tokens: largest chunk.
        all_experts: experts of the model.
        first_expert, experts: the contiguous range that this rank holds; all of them by default.
        tile: tokens of a tile, one of TILES. With 128 a block has registers to multiply while it adds up what
            it multiplied before, and reads twice as much for each product.

    Raises:
        ValueError: no tokens, beyond 128 experts, or another tile.
    """

    def __init__(
        self,
        max_tokens: int,
        all_experts: int,
        device: torch.device,
        first_expert: int = 0,
        experts: int | None = None,
        tile: int = MEASURED_TILE,
    ) -> None:
        if tile not in TILES:
            raise ValueError(f"tiles of {tile} tokens, expected one of {TILES}")
        self.tile = tile
        self.max_tokens = max_tokens
        self.first_expert = first_expert
        self.experts = held_experts(all_experts, first_expert, experts)
        if max_tokens < 1:
            raise ValueError(f"a chunk of {max_tokens} tokens; there must be at least 1")
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        pairs = max_tokens * TOP_K
        tiles = min(pairs, pairs // tile + self.experts)
        rows = tiles * tile

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.rank = buffer(pairs, dtype=torch.int32)
        self.slots = buffer(pairs, dtype=torch.int32)
        self.counts = buffer(self.experts, dtype=torch.int32)
        self.first_tile = buffer(self.experts, dtype=torch.int32)
        self.tiles = buffer(tiles, 4, dtype=torch.int32)
        self.tile_count = buffer(1, dtype=torch.int32)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.activations = buffer(tiles, TILES_K, tile * (TILE + 4), dtype=torch.uint8)
        self.hidden = buffer(tiles, TILES_K, tile * TILE, dtype=torch.uint8)
        self.row_weight = buffer(rows, dtype=torch.float32)
        self.rows = buffer(rows, DIM, dtype=torch.bfloat16)

    @property
    def bytes(self) -> int:
        """Device memory held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def moe_fp8(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Fp8Experts,
    workspace: Fp8Workspace,
    out: Tensor | None = None,
    ranked: bool = False,
) -> Tensor:
    """``reference.moe`` in FP8; the sum of this rank's experts.

    Activations are rounded to e4m3: x with a scale per token and 128 columns, the gated hidden state with the
    constant factor 8, which the clamps of the SwiGLU allow.

    Args:
        x: [T, 2880] bf16. expert_ids: [T, 4] int64, negative for padding. expert_weights: [T, 4] bf16.
        out: [T, 2880] bf16, allocated when None.
        ranked: the workspace holds ranks and tiles of these ids already (``chunk_route.route_ranked``).

    Returns:
        ``out``: float32 sums over k in order of bf16 terms; identical from run to run.
    """
    tokens = x.shape[0]
    out = torch.empty_like(x) if out is None else out
    _check_arguments(x, expert_ids, expert_weights, experts, workspace, out)
    multiply(x, expert_ids, expert_weights, experts, workspace, ranked)
    launch("fp8_combine", workspace.rows.data_ptr(), workspace.slots.data_ptr(), out.data_ptr(), tokens)
    return out


def moe_add_rms_norm_(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Fp8Experts,
    workspace: Fp8Workspace,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    ranked: bool = False,
) -> Tensor:
    """``moe_fp8``, then ``residual += moe`` in place, then the next RMSNorm of it, which is returned.

    Args:
        x, residual: [T, 2880] bf16. norm_weight: [2880] bf16. The others as of ``moe_fp8``.
    """
    _check_arguments(x, expert_ids, expert_weights, experts, workspace, residual)
    multiply(x, expert_ids, expert_weights, experts, workspace, ranked)
    return combine_rms_norm_(workspace.rows, workspace.slots, residual, norm_weight, eps)


def multiply(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Fp8Experts,
    workspace: Fp8Workspace,
    ranked: bool = False,
) -> None:
    """Everything but the combine: weighted outputs in workspace.rows, their places in workspace.slots."""
    if not ranked:
        route(expert_ids, workspace)
    quantise(x, expert_ids, expert_weights, workspace)
    run_experts(experts, workspace)


def route(expert_ids: Tensor, workspace: Fp8Workspace) -> None:
    """Rank every pair within its expert and lay out the token tiles."""
    launch(
        "fp8_rank",
        *(expert_ids.data_ptr(), workspace.rank.data_ptr(), workspace.counts.data_ptr()),
        *(workspace.first_tile.data_ptr(), workspace.tiles.data_ptr(), workspace.tile_count.data_ptr()),
        *(workspace.ticket.data_ptr(), expert_ids.numel(), workspace.first_expert, workspace.experts),
        workspace.tile,
    )


def quantise(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, workspace: Fp8Workspace) -> None:
    """Round activations to e4m3 and copy them to the rows of their experts."""
    launch(
        "fp8_quantise",
        *(x.data_ptr(), expert_ids.data_ptr(), expert_weights.data_ptr(), workspace.rank.data_ptr()),
        *(workspace.first_tile.data_ptr(), workspace.activations.data_ptr(), workspace.row_weight.data_ptr()),
        *(workspace.slots.data_ptr(), x.shape[0], workspace.first_expert, workspace.experts, workspace.tile),
    )


def run_experts(experts: Fp8Experts, workspace: Fp8Workspace) -> None:
    """Both projections: workspace.activations -> workspace.hidden -> workspace.rows."""
    tiles = (workspace.tiles.data_ptr(), workspace.tile_count.data_ptr())
    launch(
        "fp8_gate_up",
        *(workspace.activations.data_ptr(), experts.gate_up.values.data_ptr()),
        *(experts.gate_up.scales.data_ptr(), experts.gate_up_bias.data_ptr(), *tiles),
        *(workspace.hidden.data_ptr(), workspace.tile, workspace.blocks),
    )
    launch(
        "fp8_down",
        *(workspace.hidden.data_ptr(), experts.down.values.data_ptr(), experts.down.scales.data_ptr()),
        *(experts.down_bias.data_ptr(), *tiles, workspace.row_weight.data_ptr()),
        *(workspace.rows.data_ptr(), workspace.tile, workspace.blocks),
    )


def _check_arguments(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Fp8Experts,
    workspace: Fp8Workspace,
    out: Tensor,
) -> None:
    tokens = x.shape[0]
    if not 1 <= tokens <= workspace.max_tokens:
        raise ValueError(f"{tokens} tokens, the workspace holds 1 to {workspace.max_tokens}")
    if experts.experts != workspace.experts:
        raise ValueError(f"weights of {experts.experts} experts, the workspace is for {workspace.experts}")
    for name, tensor, shape, dtype in (
        ("x", x, (tokens, DIM), torch.bfloat16),
        ("expert_ids", expert_ids, (tokens, TOP_K), torch.int64),
        ("expert_weights", expert_weights, (tokens, TOP_K), torch.bfloat16),
        ("out", out, (tokens, DIM), torch.bfloat16),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous {shape} {dtype}"
            )
