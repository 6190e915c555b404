"""The MoE of a small batch on sm_90: MXFP4 weights streamed once, bf16 activations, deterministic combine.

Three launches a layer: route (optionally the norm in front; logits, top-4, softmax, grouping, and the split
of the activations into two e4m3 parts), experts (both projections), combine (optionally with the residual
add and the next norm). Each may overlap its predecessor's end (programmatic dependent launch) when the plan
says ``overlap``.

Blocks of the experts' launch wait for one another, one block per SM: of the streams that share a device's
SMs at a time, only one may run it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.moe.build import launch
from antiphon.kernels.moe.expert_range import TOP_K, held_experts
from antiphon.kernels.moe.streamed import DIM, StreamedExperts

SWIGLU_LIMIT = 7.0
"""Of the clamps in ``clamped_swiglu`` (csrc/hopper.cuh), by which the kernels of chunks scale as well."""
MAX_TOKENS = 512
TOKEN_TILES = (4, 8, 16, 24)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a step of a given size is cut up.

    Attributes:
        token_tile: tokens of one expert that share one pass over its weights (4, 8, 16 or 24).
        overlap: programmatic dependent launch.
    """

    token_tile: int
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise ValueError(f"token_tile {self.token_tile} is not one of {TOKEN_TILES}")


def plan_launch(tokens: int, experts: int) -> LaunchPlan:
    """The plan for ``tokens`` tokens spread evenly over ``experts`` experts of the model.

    A tile holds the mean load of an expert and 1.4 standard deviations: an expert with two tiles reads its
    weights twice, and a larger tile leaves less shared memory for bytes in flight. The factor was measured
    (docs/perf-log.md).
    """
    mean = tokens * TOP_K / experts
    load = min(tokens, mean + 1.4 * math.sqrt(mean))
    tile = next((size for size in TOKEN_TILES if load <= size), TOKEN_TILES[-1])
    return LaunchPlan(token_tile=tile)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts serve which tokens, and the same grouped by expert. Until the next one is made, the
    workspace also holds the split activations of its tokens.

    Attributes:
        expert_ids: [T, 4] int64, of the whole model; a negative id is padding.
        expert_weights: [T, 4] bf16.
        order: [T * 4] int32, pair (token * 4 + k) of each slot, by expert and then by pair.
        tiles: [tiles, 4] int32, (local expert, first slot, slots, 0).
        tile_count: [1] int32, tiles in use.
        plan: what the grouping was made for.
    """

    expert_ids: Tensor
    expert_weights: Tensor
    order: Tensor
    tiles: Tensor
    tile_count: Tensor
    plan: LaunchPlan


def max_tiles(pairs: int, experts: int, token_tile: int) -> int:
    """Token tiles that ``pairs`` (token, k) pairs need at most."""
    return min(pairs, experts + pairs // token_tile)


class MoeWorkspace:
    """Buffers that the launches of one layer share; layers use the same ones in turn, on one stream.

    Args:
        max_tokens: largest step.
        all_experts: experts of the model.
        first_expert, experts: the contiguous range that this rank holds; all of them by default.

    Raises:
        ValueError: beyond 512 tokens or 128 experts.
    """

    def __init__(
        self,
        max_tokens: int,
        all_experts: int,
        device: torch.device,
        first_expert: int = 0,
        experts: int | None = None,
    ) -> None:
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise ValueError(f"{max_tokens} tokens; the streaming kernels take 1 to {MAX_TOKENS}")
        self.max_tokens = max_tokens
        self.all_experts = all_experts
        self.first_expert = first_expert
        self.experts = held_experts(all_experts, first_expert, experts)
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        pairs = max_tokens * TOP_K
        tiles = max_tiles(pairs, self.experts, TOKEN_TILES[0])
        self.expert_ids = torch.empty(max_tokens, TOP_K, dtype=torch.int64, device=device)
        self.expert_weights = torch.empty(max_tokens, TOP_K, dtype=torch.bfloat16, device=device)
        self.order = torch.empty(pairs, dtype=torch.int32, device=device)
        self.tiles = torch.empty(tiles, 4, dtype=torch.int32, device=device)
        self.tile_count = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.empty(max_tokens, all_experts, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(1 + max_tokens, dtype=torch.int32, device=device)
        self.ready = torch.zeros(tiles, dtype=torch.int32, device=device)
        # Activations of a token: 2880 columns in two e4m3 parts; hidden states lie in tiles, and of split
        # experts they have fewer columns.
        tile_bytes = max(max_tiles(pairs, self.experts, tile) * tile for tile in TOKEN_TILES) * 2 * DIM
        self.activations = torch.empty(max_tokens, 2 * DIM, dtype=torch.uint8, device=device)
        self.hidden = torch.empty(tile_bytes, dtype=torch.uint8, device=device)
        self.scale = torch.empty(max_tokens, dtype=torch.float32, device=device)
        self.partial = torch.empty(pairs, DIM, dtype=torch.float32, device=device)


def route_grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    workspace: MoeWorkspace,
    plan: LaunchPlan | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Routing:
    """``reference.route`` with top_k 4, the grouping by expert and the split, in one launch.

    Args:
        x: [T, 2880] bf16. weight: [E, 2880] bf16. bias: [E] bf16.
        norm_weight: [2880] bf16: x is the residual stream, and its RMSNorm is routed (unrounded) and split
            (rounded to bf16). None: x is normed already.

    Returns:
        views of the workspace's buffers, valid until its next routing.
    """
    tokens = _check_tokens(x, workspace)
    _check(weight, (workspace.all_experts, DIM), torch.bfloat16, "router weight")
    _check(bias, (workspace.all_experts,), torch.bfloat16, "router bias")
    if norm_weight is not None:
        _check(norm_weight, (DIM,), torch.bfloat16, "norm_weight")
    plan = plan or plan_launch(tokens, workspace.all_experts)
    ids, weights = workspace.expert_ids[:tokens], workspace.expert_weights[:tokens]
    launch(
        "route",
        *(x.data_ptr(), None if norm_weight is None else norm_weight.data_ptr(), eps),
        *(weight.data_ptr(), bias.data_ptr(), workspace.logits.data_ptr(), ids.data_ptr()),
        *(weights.data_ptr(), workspace.activations.data_ptr(), workspace.scale.data_ptr()),
        *(workspace.tickets.data_ptr(), tokens, workspace.all_experts, workspace.order.data_ptr()),
        *(workspace.tiles.data_ptr(), workspace.tile_count.data_ptr(), workspace.ready.data_ptr()),
        *(workspace.first_expert, workspace.experts, plan.token_tile, int(plan.overlap)),
    )
    return Routing(ids, weights, workspace.order, workspace.tiles, workspace.tile_count, plan)


def group(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    workspace: MoeWorkspace,
    plan: LaunchPlan | None = None,
) -> Routing:
    """The grouping by expert and the split of a routing that was made elsewhere, in two launches.

    Args:
        x: [T, 2880] bf16, normed. expert_ids: [T, 4] int64. expert_weights: [T, 4] bf16.
    """
    tokens = _check_tokens(x, workspace)
    _check(expert_ids, (tokens, TOP_K), torch.int64, "expert_ids")
    _check(expert_weights, (tokens, TOP_K), torch.bfloat16, "expert_weights")
    plan = plan or plan_launch(tokens, workspace.all_experts)
    launch(
        "group",
        *(expert_ids.data_ptr(), tokens * TOP_K, workspace.order.data_ptr(), workspace.tiles.data_ptr()),
        *(workspace.tile_count.data_ptr(), workspace.ready.data_ptr()),
        *(workspace.first_expert, workspace.experts, plan.token_tile, int(plan.overlap)),
    )
    launch(
        "split",
        *(x.data_ptr(), workspace.activations.data_ptr(), workspace.scale.data_ptr()),
        *(tokens, plan.token_tile, int(plan.overlap)),
    )
    return Routing(expert_ids, expert_weights, workspace.order, workspace.tiles, workspace.tile_count, plan)


def moe_streamed(
    routing: Routing, experts: StreamedExperts, workspace: MoeWorkspace, out: Tensor | None = None
) -> Tensor:
    """``reference.moe`` on streamed weights; the sum of this rank's experts or columns. Once per routing.

    Args:
        out: [T, 2880] bf16, allocated when None.

    Returns:
        ``out``: float32 sums over k in order, rounded once; identical from run to run.
    """
    tokens = routing.expert_ids.shape[0]
    if out is None:
        out = torch.empty(tokens, DIM, dtype=torch.bfloat16, device=workspace.partial.device)
    _check(out, (tokens, DIM), torch.bfloat16, "out")
    run_experts(routing, experts, workspace)
    launch(
        "combine",
        *(workspace.partial.data_ptr(), routing.expert_ids.data_ptr(), out.data_ptr(), tokens),
        *(workspace.first_expert, workspace.experts, int(routing.plan.overlap)),
    )
    return out


def moe_add_rms_norm(
    routing: Routing,
    experts: StreamedExperts,
    workspace: MoeWorkspace,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """``moe_streamed``, then ``residual += moe`` in place, then the next RMSNorm of the new residual.

    Args:
        residual: [T, 2880] bf16. norm_weight: [2880] bf16.

    Returns:
        the normed states [T, 2880] bf16.
    """
    tokens = routing.expert_ids.shape[0]
    out = torch.empty_like(residual) if out is None else out
    _check(out, (tokens, DIM), torch.bfloat16, "out")
    _check(residual, (tokens, DIM), torch.bfloat16, "residual")
    _check(norm_weight, (DIM,), torch.bfloat16, "norm_weight")
    run_experts(routing, experts, workspace)
    launch(
        "combine_norm",
        *(workspace.partial.data_ptr(), routing.expert_ids.data_ptr(), residual.data_ptr()),
        *(norm_weight.data_ptr(), out.data_ptr(), residual.data_ptr(), eps, tokens),
        *(workspace.first_expert, workspace.experts, int(routing.plan.overlap)),
    )
    return out


def run_experts(routing: Routing, experts: StreamedExperts, workspace: MoeWorkspace) -> None:
    """Both projections of the split activations, once per routing; the workspace holds both ends."""
    if experts.experts != workspace.experts:
        raise ValueError(f"weights of {experts.experts} experts, the workspace is for {workspace.experts}")
    plan = routing.plan
    launch(
        "split_experts" if experts.split else "experts",
        *(experts.gate_up.data_ptr(), experts.gate_up_bias.data_ptr()),
        *(experts.down.data_ptr(), experts.down_bias.data_ptr()),
        *(workspace.activations.data_ptr(), workspace.scale.data_ptr(), routing.order.data_ptr()),
        *(routing.tiles.data_ptr(), routing.tile_count.data_ptr(), workspace.ready.data_ptr()),
        *(workspace.hidden.data_ptr(), routing.expert_weights.data_ptr(), workspace.partial.data_ptr()),
        max_tiles(routing.expert_ids.shape[0] * TOP_K, workspace.experts, plan.token_tile),
        *((experts.columns,) if experts.split else ()),
        *(plan.token_tile, workspace.blocks, int(plan.overlap)),
    )


def _check_tokens(x: Tensor, workspace: MoeWorkspace) -> int:
    tokens = x.shape[0]
    if not 1 <= tokens <= workspace.max_tokens:
        raise ValueError(f"{tokens} tokens, the workspace holds 1 to {workspace.max_tokens}")
    _check(x, (tokens, DIM), torch.bfloat16, "x")
    return tokens


def _check(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected contiguous {shape} {dtype}"
        )
