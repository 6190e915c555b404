"""The second half of a layer on a CUDA device: router, experts, residual, and the norm that follows.

Two implementations behind one call. Which kernels serve a step of a given size is fixed by its number of
tokens; nothing falls back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels import portable_moe
from antiphon.kernels.dense.norm import rms_norm
from antiphon.kernels.moe import mixed, prefill
from antiphon.kernels.moe.decode import MAX_TOKENS, MoeWorkspace, moe_add_rms_norm, route_grouped
from antiphon.kernels.moe.mixed import MixedWorkspace
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.regime import streams_4_bit
from antiphon.kernels.reference import ExpertMatrix
from antiphon.kernels.router import route
from antiphon.model.chunk_router import ChunkRouter
from antiphon.model.config import GptOssConfig
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.workspaces import Workspaces


@dataclass(frozen=True, slots=True)
class CheckpointExperts:
    """One layer's router and experts as the checkpoint stores them, on the device."""

    gate_weight: Tensor
    gate_bias: Tensor
    gate_up: ExpertMatrix
    gate_up_bias: Tensor
    down: ExpertMatrix
    down_bias: Tensor

    def convert(self, resident_fp8: bool) -> ConvertedExperts:
        """The experts as the Hopper kernels read them."""
        return ConvertedExperts.from_checkpoint(
            *(self.gate_up, self.gate_up_bias, self.down, self.down_bias), resident_fp8=resident_fp8
        )


class ExpertLayers(Protocol):
    """All layers' routers and experts.

    Attributes:
        inexact_blocks: blocks of 32 weights (resident FP8: tiles of 128 x 128) that may lose bits in e4m3.
        blocks: of how many.
    """

    inexact_blocks: int
    blocks: int

    def add_layer(self, experts: CheckpointExperts) -> None:
        """Take the next layer, in order; the checkpoint's form may be freed afterwards."""

    def reserve(self, tokens: int) -> None:
        """See ``model.forward.ReservesBuffers``."""

    def forward(
        self,
        layer: int,
        x: Tensor,
        normed: Tensor | None,
        norm: Tensor,
        following_norm: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``x + experts(normed)`` and its RMSNorm with ``following_norm``; all [T, H], x may be reused.

        Args:
            normed: the RMSNorm of x with ``norm``; None has it made here.
            live: [1] int32, tokens that are not padding; whether those behind it reach an expert is open.
        """


class PortableExpertLayers:
    """Triton on MXFP4 weights as they are, for any shape."""

    inexact_blocks = blocks = 0

    def __init__(self, config: GptOssConfig) -> None:
        self._config = config
        self._layers: list[CheckpointExperts] = []

    def add_layer(self, experts: CheckpointExperts) -> None:
        """Take the next layer."""
        self._layers.append(experts)

    def reserve(self, tokens: int) -> None:
        """No buffers are kept."""

    def forward(
        self,
        layer: int,
        x: Tensor,
        normed: Tensor | None,
        norm: Tensor,
        following_norm: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See ``ExpertLayers``."""
        config, experts = self._config, self._layers[layer]
        normed = rms_norm(x, norm, config.rms_norm_eps) if normed is None else normed
        ids, weights = route(normed, experts.gate_weight, experts.gate_bias, config.experts_per_token)
        x = portable_moe.moe(
            *(normed, ids, weights, experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias),
            residual=x,
            limit=config.swiglu_limit,
        )
        return x, rms_norm(x, following_norm, config.rms_norm_eps)


class HopperExpertLayers:
    """The kernels made for GPT-OSS on sm_90: 4 bits streamed for few tokens, e4m3 products for many.

    Args:
        resident_fp8: hold every layer's FP8 tiles beside the 4-bit weights and multiply long chunks by them;
            otherwise the grouped GEMM widens the 4-bit weights itself.
        chunks: how long ones are multiplied.

    Raises:
        ValueError: no kernel is built for such a choice.
    """

    def __init__(
        self, config: GptOssConfig, device: torch.device, resident_fp8: bool, chunks: ChunkChoices
    ) -> None:
        tile, built = chunks.expert_tile, prefill.TILES if resident_fp8 else mixed.TILES
        if tile is not None and tile not in built:
            raise ValueError(f"expert tiles of {tile} tokens, expected one of {built}")
        self._config = config
        self._device = device
        self._chunks = chunks
        self.resident_fp8 = resident_fp8
        self.inexact_blocks = self.blocks = 0
        self._routers: list[tuple[Tensor, Tensor]] = []
        self._layers: list[ConvertedExperts] = []
        self._workspace = MoeWorkspace(MAX_TOKENS, config.num_experts, device)
        fp8 = partial(Fp8Workspace, all_experts=config.num_experts, device=device)
        self._fp8_buffers = Workspaces(partial(fp8, tile=prefill.MEASURED_TILE if tile is None else tile))
        self._mixed_buffers = Workspaces(
            partial(MixedWorkspace, all_experts=config.num_experts, device=device)
        )
        self._route = ChunkRouter(config.num_experts, device)

    def add_layer(self, experts: CheckpointExperts) -> None:
        """Convert the next layer."""
        self.add_converted(experts.gate_weight, experts.gate_bias, experts.convert(self.resident_fp8))

    def add_converted(self, gate_weight: Tensor, gate_bias: Tensor, experts: ConvertedExperts) -> None:
        """Take the next layer as it is computed with.

        Raises:
            ValueError: it has no FP8 tiles, and these layers have.
        """
        experts.check(self.resident_fp8)
        self._routers.append((gate_weight, gate_bias))
        self._layers.append(experts)
        inexact, blocks = experts.inexact
        self.inexact_blocks += inexact
        self.blocks += blocks

    def sharing(self, resident_fp8: bool, chunks: ChunkChoices) -> HopperExpertLayers:
        """The same layers, multiplied otherwise, with buffers of its own.

        Raises:
            ValueError: as when layers are added, or for such choices.
        """
        twin = HopperExpertLayers(self._config, self._device, resident_fp8, chunks)
        for router, experts in zip(self._routers, self._layers, strict=True):
            twin.add_converted(*router, experts if resident_fp8 else replace(experts, fp8=None))
        return twin

    def _streams(self, tokens: int) -> bool:
        return streams_4_bit(tokens, self._config.num_experts, widened_alone=not self.resident_fp8)

    def reserve(self, tokens: int) -> None:
        """See ``ExpertLayers``."""
        if not self._streams(tokens):
            (self._fp8_buffers if self.resident_fp8 else self._mixed_buffers).reserve(tokens)

    def forward(
        self,
        layer: int,
        x: Tensor,
        normed: Tensor | None,
        norm: Tensor,
        following_norm: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See ``ExpertLayers``."""
        config = self._config
        router, experts = self._routers[layer], self._layers[layer]
        if self._streams(x.shape[0]):
            routed, own_norm = (x, norm) if normed is None else (normed, None)
            routing = route_grouped(
                *(routed, *router, self._workspace),
                norm_weight=own_norm,
                eps=config.rms_norm_eps,
            )
            normed = moe_add_rms_norm(
                *(
                    routing,
                    experts.streamed,
                    self._workspace,
                    x,
                    following_norm,
                    config.rms_norm_eps,
                ),
            )
            return x, normed
        normed = rms_norm(x, norm, config.rms_norm_eps) if normed is None else normed
        behind, ranked = (x, following_norm, config.rms_norm_eps), self._route.ranks(x.shape[0])
        if self.resident_fp8 and experts.fp8 is not None:
            fp8_buffers = self._fp8_buffers.of(x.shape[0])
            choice = self._route(normed, router, fp8_buffers, fp8_buffers.tile, live)
            return x, prefill.moe_add_rms_norm_(
                *(normed, *choice, experts.fp8, fp8_buffers, *behind), ranked=ranked
            )
        buffers, tile = self._mixed_buffers.of(x.shape[0]), self._chunks.expert_tile
        tile = mixed.choose_tile(x.shape[0], config.num_experts) if tile is None else tile
        choice = self._route(normed, router, buffers, tile, live)
        return x, mixed.moe_add_rms_norm_(
            *(normed, *choice, experts.streamed, experts.exponents, buffers, *behind, tile, ranked)
        )
