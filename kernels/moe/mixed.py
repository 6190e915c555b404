"""The MoE of a chunk of tokens on sm_90: MXFP4 weights widened to e4m3 in registers, e4m3 activations.

Four launches: rank the pairs within their experts, quantise the activations into tiles of tokens, multiply
(gate/up with bias and SwiGLU, whose output is already the second operand, and down with bias and routing
weight), combine.
The weights are those of the streaming road (``streamed.py``), so that no second form of them is held.

Rounding: an activation has the scale of its token. With few tokens an expert the weights are exact; with
many, a weight has the exponent of its row's largest block, and blocks of 32 weights whose exponent lies more
than 14 below that may lose bits; they are counted, never hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.chunk_norm import combine_rms_norm_
from antiphon.kernels.moe.expert_range import TOP_K, held_experts
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix

NARROW_TILES = (32, 48, 64)
"""Tokens of a tile whose sums meet the block scales; wider ones have the scales in the weights."""
TILES = (*NARROW_TILES, 160, 256, 288)
"""What the kernels are built for; 160 has three warpgroups at work, 256 and 288 have two."""
ROW_BYTES = -(-DIM // 128) * 128
"""Of a token's operand: whole tiles of 128 columns."""
EXACT_SPREAD = 14
"""An FP4 value times 2^d is an e4m3 number for -8 <= d <= 6."""


@dataclass(frozen=True, slots=True)
class RowExponents:
    """The largest block exponent of every weight row, by which the row is widened.

    Attributes:
        gate_up: [E, 2 I] uint8, biased by 127 as in the checkpoint. down: [E, 2880] uint8.
        inexact_blocks: blocks of 32 values whose exponent lies more than 14 below their row's.
        blocks: blocks in all.
    """

    gate_up: Tensor
    down: Tensor
    inexact_blocks: int
    blocks: int

    @classmethod
    def from_checkpoint(cls, gate_up: ExpertMatrix, down: ExpertMatrix) -> RowExponents:
        """Of one layer. Blocks that hold only zeros have no exponent to keep."""
        tops, inexact = zip(*(_row_tops(matrix) for matrix in (gate_up, down)), strict=True)
        blocks = gate_up.scales.numel() + down.scales.numel()
        return cls(tops[0], tops[1], int(inexact[0] + inexact[1]), blocks)


def _row_tops(matrix: ExpertMatrix) -> tuple[Tensor, Tensor]:
    """[E, rows] uint8, and how many blocks lie too far below; expert by expert, to need little memory."""
    tops = torch.empty(matrix.scales.shape[:2], dtype=torch.uint8, device=matrix.scales.device)
    inexact = torch.zeros((), dtype=torch.int64, device=matrix.scales.device)
    for expert in range(matrix.scales.shape[0]):
        used = (matrix.blocks[expert] & 0x77).amax(dim=-1) != 0  # [rows, blocks]
        exponents = torch.where(used, matrix.scales[expert], 0)
        tops[expert] = exponents.amax(dim=-1)
        apart = tops[expert].to(torch.int16)[:, None] - exponents.to(torch.int16)
        inexact += (used & (apart > EXACT_SPREAD)).sum()
    return tops, inexact


def choose_tile(tokens: int, experts: int) -> int:
    """Tokens of a tile: the smallest that holds an expert's, to two deviations above the mean; else 256.

    A weight is widened once for every tile that it meets, which costs as much as the products of about a
    hundred tokens. Where an expert has several tiles in any case, 256 is the fastest.

    Args:
        tokens: of the chunk. experts: of the model, all of them about equally wanted.
    """
    mean = tokens * TOP_K / experts
    load = mean + 2 * math.sqrt(mean)
    return next((tile for tile in TILES if load <= tile), 256)


class MixedWorkspace:
    """Buffers of one layer's launches; layers use the same ones in turn, on one stream.

    Hidden states of split experts are narrower than what there is room for.

    Args:
        max_tokens: largest chunk.
        all_experts: experts of the model.
        first_expert, experts: the contiguous range that this rank holds; all of them by default.

    Raises:
        ValueError: no tokens, or beyond 128 experts.
    """

    def __init__(
        self,
        max_tokens: int,
        all_experts: int,
        device: torch.device,
        first_expert: int = 0,
        experts: int | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.first_expert = first_expert
        self.experts = held_experts(all_experts, first_expert, experts)
        if max_tokens < 1:
            raise ValueError(f"a chunk of {max_tokens} tokens; there must be at least 1")
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.all_experts = all_experts
        pairs = max_tokens * TOP_K

        def most_tiles(tile_rows: int) -> int:
            return min(pairs, pairs // tile_rows + self.experts)

        rows = max(most_tiles(tile) * tile for tile in TILES)
        tiles = most_tiles(NARROW_TILES[0])

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.rank = buffer(pairs, dtype=torch.int32)
        self.slots = buffer(pairs, dtype=torch.int32)
        self.counts = buffer(self.experts, dtype=torch.int32)
        self.first_tile = buffer(self.experts, dtype=torch.int32)
        self.tiles = buffer(tiles, 4, dtype=torch.int32)
        self.tile_count = buffer(1, dtype=torch.int32)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.ready = torch.zeros(1 + tiles, dtype=torch.int32, device=device)
        self.activations = buffer(rows * ROW_BYTES, dtype=torch.uint8)
        self.hidden = buffer(rows * ROW_BYTES, dtype=torch.uint8)
        self.token_scale = buffer(rows, dtype=torch.float32)
        self.row_weight = buffer(rows, dtype=torch.float32)
        self.rows = buffer(rows, DIM, dtype=torch.bfloat16)

    @property
    def bytes(self) -> int:
        """Device memory held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def moe_mixed(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: StreamedExperts,
    exponents: RowExponents,
    workspace: MixedWorkspace,
    out: Tensor | None = None,
    tile: int | None = None,
    ranked: bool = False,
    overlap: bool = False,
) -> Tensor:
    """``reference.moe`` with e4m3 operands; the sum of this rank's experts or columns.

    Activations are rounded to e4m3: x with a scale per token, the gated hidden state with the constant factor
    8, which the clamps of the SwiGLU allow.

    Args:
        x: [T, 2880] bf16. expert_ids: [T, 4] int64, negative for padding. expert_weights: [T, 4] bf16.
        out: [T, 2880] bf16, allocated when None.
        tile: tokens of a tile, one of TILES; ``choose_tile`` when None.
        ranked: the workspace holds ranks and tiles of these ids already (``chunk_route.route_ranked``).
        overlap: quantising, and the products of whole experts, may begin while the launch ahead ends.

    Returns:
        ``out``: float32 sums over k in order of bf16 terms; identical from run to run.

    Raises:
        ValueError: another shape or dtype, or another tile.
    """
    tokens = x.shape[0]
    out = torch.empty_like(x) if out is None else out
    _check_arguments(x, expert_ids, expert_weights, experts, workspace, out)
    tile = choose_tile(tokens, workspace.all_experts) if tile is None else tile
    multiply(x, expert_ids, expert_weights, experts, exponents, workspace, tile, ranked, overlap)
    launch("fp8_combine", workspace.rows.data_ptr(), workspace.slots.data_ptr(), out.data_ptr(), tokens)
    return out


def moe_add_rms_norm_(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: StreamedExperts,
    exponents: RowExponents,
    workspace: MixedWorkspace,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    tile: int | None = None,
    ranked: bool = False,
) -> Tensor:
    """``moe_mixed``, then ``residual += moe`` in place, then the next RMSNorm of it, which is returned.

    Args:
        x, residual: [T, 2880] bf16. norm_weight: [2880] bf16. The others as of ``moe_mixed``.
    """
    _check_arguments(x, expert_ids, expert_weights, experts, workspace, residual)
    tile = choose_tile(x.shape[0], workspace.all_experts) if tile is None else tile
    multiply(x, expert_ids, expert_weights, experts, exponents, workspace, tile, ranked)
    return combine_rms_norm_(workspace.rows, workspace.slots, residual, norm_weight, eps)


def multiply(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: StreamedExperts,
    exponents: RowExponents,
    workspace: MixedWorkspace,
    tile: int,
    ranked: bool = False,
    overlap: bool = False,
) -> None:
    """Everything but the combine: weighted outputs in workspace.rows, their places in workspace.slots."""
    if not ranked:
        route(expert_ids, workspace, tile)
    quantise(x, expert_ids, expert_weights, workspace, tile, overlap)
    run_experts(experts, exponents, workspace, tile, overlap)


def route(expert_ids: Tensor, workspace: MixedWorkspace, tile: int) -> None:
    """Rank every pair within its expert and lay out the tiles of so many tokens.

    Raises:
        ValueError: no kernel is built for such a tile, for which the workspace may be too small.
    """
    if tile not in TILES:
        raise ValueError(f"tiles of {tile} tokens, expected one of {TILES}")
    launch(
        "fp8_rank",
        *(expert_ids.data_ptr(), workspace.rank.data_ptr(), workspace.counts.data_ptr()),
        *(workspace.first_tile.data_ptr(), workspace.tiles.data_ptr(), workspace.tile_count.data_ptr()),
        *(workspace.ticket.data_ptr(), expert_ids.numel(), workspace.first_expert, workspace.experts, tile),
    )


def quantise(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    workspace: MixedWorkspace,
    tile: int,
    overlap: bool = False,
) -> None:
    """Round activations to e4m3 and copy them to the rows of their experts."""
    launch(
        "mixed_quantise",
        *(x.data_ptr(), expert_ids.data_ptr(), expert_weights.data_ptr(), workspace.rank.data_ptr()),
        *(workspace.first_tile.data_ptr(), workspace.activations.data_ptr()),
        *(workspace.token_scale.data_ptr(), workspace.row_weight.data_ptr(), workspace.slots.data_ptr()),
        *(x.shape[0], workspace.first_expert, workspace.experts, tile, int(overlap)),
    )


def run_experts(
    experts: StreamedExperts,
    exponents: RowExponents,
    workspace: MixedWorkspace,
    tile: int,
    overlap: bool = False,
) -> None:
    """Both projections: workspace.activations -> workspace.hidden -> workspace.rows.

    Blocks wait for one another, so two such launches, or one and a decode step's experts, must not run on a
    device at the same time: one stream per process, and no CUDA MPS.
    """
    columns, last = ((experts.columns,), ()) if experts.split else ((), (int(overlap),))
    launch(
        "split_mixed_experts" if experts.split else "mixed_experts",
        *(workspace.activations.data_ptr(), experts.gate_up.data_ptr(), exponents.gate_up.data_ptr()),
        *(experts.gate_up_bias.data_ptr(), experts.down.data_ptr(), exponents.down.data_ptr()),
        *(experts.down_bias.data_ptr(), workspace.tiles.data_ptr(), workspace.tile_count.data_ptr()),
        *(workspace.ready.data_ptr(), workspace.token_scale.data_ptr(), workspace.row_weight.data_ptr()),
        *(workspace.hidden.data_ptr(), workspace.rows.data_ptr()),
        *(*columns, tile, workspace.blocks, *last),
    )


def _check_arguments(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: StreamedExperts,
    workspace: MixedWorkspace,
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
