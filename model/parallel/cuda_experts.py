"""What one rank's experts add to the residual stream on a GPU, before the sum over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels import portable_moe
from antiphon.kernels.moe import build as moe_build
from antiphon.kernels.moe.chunk_route import FASTER_TOKENS
from antiphon.kernels.moe.decode import MAX_TOKENS, MoeWorkspace, moe_streamed, route_grouped
from antiphon.kernels.moe.mixed import MixedWorkspace, choose_tile, moe_mixed
from antiphon.kernels.moe.prefill import Fp8Workspace, moe_fp8
from antiphon.kernels.moe.regime import streams_4_bit
from antiphon.kernels.router import route
from antiphon.model.chunk_router import ChunkRouter
from antiphon.model.config import GptOssConfig
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_experts import CheckpointExperts
from antiphon.model.parallel.layout import RankShape
from antiphon.model.workspaces import Workspaces


class RankExperts(Protocol):
    """All layers' routers, whole, and this rank's part of their experts.

    Attributes:
        inexact_blocks, blocks: of this rank; as in ``model.cuda_experts.ExpertLayers``.
    """

    road: str
    inexact_blocks: int
    blocks: int

    def add_layer(self, experts: CheckpointExperts) -> None:
        """Take the next layer, in order; the checkpoint's form may be freed afterwards."""

    def reserve(self, tokens: int) -> None:
        """See ``model.forward.ReservesBuffers``."""

    def delta(self, layer: int, normed: Tensor, live: Tensor) -> Tensor:
        """[T, H] -> [T, H], the weighted sum over the chosen experts, as far as they are here.

        Args:
            live: [1] int32, tokens that are not padding; whether those behind it reach an expert is open.
        """


class PortableRankExperts:
    """Triton on MXFP4 weights as they are: experts split over ranks or dealt out whole, of any shape.

    Args:
        experts: the range of expert ids held here.
    """

    road = "portable"
    inexact_blocks = blocks = 0

    def __init__(self, config: GptOssConfig, experts: range) -> None:
        self._config = config
        self._experts = experts
        self._layers: list[CheckpointExperts] = []

    def add_layer(self, experts: CheckpointExperts) -> None:
        """See ``RankExperts``."""
        self._layers.append(experts)

    def reserve(self, tokens: int) -> None:
        """No buffers are kept."""

    def delta(self, layer: int, normed: Tensor, live: Tensor) -> Tensor:
        """See ``RankExperts``."""
        config, experts = self._config, self._layers[layer]
        ids, weights = route(normed, experts.gate_weight, experts.gate_bias, config.experts_per_token)
        if len(self._experts) < config.num_experts:
            here = (ids >= self._experts.start) & (ids < self._experts.stop)
            # Somebody must compute a pair, so one of another rank is computed by expert 0 and counts nothing.
            ids, weights = torch.where(here, ids - self._experts.start, 0), weights.masked_fill(~here, 0.0)
        return portable_moe.moe(
            *(normed, ids, weights, experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias),
            residual=torch.zeros_like(normed),
            limit=config.swiglu_limit,
        )


class HopperRankExperts:
    """The kernels made for GPT-OSS on sm_90, on experts dealt out whole or split; as ``HopperExpertLayers``.

    Args:
        shape: the range of expert ids and the columns held here.
        resident_fp8: hold FP8 tiles beside the 4-bit weights and multiply long chunks by them, where experts
            are whole.
        fused: route and rank short chunks in one launch, and let launches begin while the ones ahead end.
    """

    def __init__(
        self,
        config: GptOssConfig,
        shape: RankShape,
        device: torch.device,
        resident_fp8: bool,
        fused: bool = False,
    ) -> None:
        moe_build.LIBRARY.load()
        split = shape.inner_padded != config.intermediate_size
        if split:
            moe_build.SPLIT_LIBRARY.load()
        self._config = config
        self._range = config.num_experts, device, shape.experts.start, len(shape.experts)
        self._resident_fp8 = resident_fp8 and not split
        self._fused = fused
        self.road = "Hopper, resident FP8" if self._resident_fp8 else "Hopper"
        self.inexact_blocks = self.blocks = 0
        self._routers: list[tuple[Tensor, Tensor]] = []
        self._layers: list[ConvertedExperts] = []
        self._workspace = MoeWorkspace(MAX_TOKENS, *self._range)
        self._mixed_buffers = Workspaces(lambda tokens: MixedWorkspace(tokens, *self._range))
        self._fp8_buffers = Workspaces(lambda tokens: Fp8Workspace(tokens, *self._range))
        self._route = ChunkRouter(
            len(shape.experts), device, most_ranked=FASTER_TOKENS if fused else 0, overlap=fused
        )

    def add_layer(self, experts: CheckpointExperts) -> None:
        """See ``RankExperts``."""
        self.add_converted(experts.gate_weight, experts.gate_bias, experts.convert(self._resident_fp8))

    def add_converted(self, gate_weight: Tensor, gate_bias: Tensor, experts: ConvertedExperts) -> None:
        """Take the next layer as it is computed with.

        Raises:
            ValueError: it has no FP8 tiles, and these layers have.
        """
        experts.check(self._resident_fp8)
        self._routers.append((gate_weight, gate_bias))
        self._layers.append(experts)
        inexact, blocks = experts.inexact
        self.inexact_blocks += inexact
        self.blocks += blocks

    def reserve(self, tokens: int) -> None:
        """See ``RankExperts``."""
        if not streams_4_bit(tokens, self._config.num_experts, widened_alone=False):
            (self._fp8_buffers if self._resident_fp8 else self._mixed_buffers).reserve(tokens)

    def delta(self, layer: int, normed: Tensor, live: Tensor) -> Tensor:
        """See ``RankExperts``."""
        tokens = normed.shape[0]
        router, experts = self._routers[layer], self._layers[layer]
        if streams_4_bit(tokens, self._config.num_experts, widened_alone=False):
            routing = route_grouped(normed, *router, self._workspace)
            return moe_streamed(routing, experts.streamed, self._workspace)
        ranked = self._route.ranks(tokens)
        if experts.fp8 is not None:
            fp8_buffers = self._fp8_buffers.of(tokens)
            choice = self._route(normed, router, fp8_buffers, fp8_buffers.tile, live)
            return moe_fp8(normed, *choice, experts.fp8, fp8_buffers, ranked=ranked)
        buffers, tile = self._mixed_buffers.of(tokens), choose_tile(tokens, self._config.num_experts)
        choice = self._route(normed, router, buffers, tile, live)
        return moe_mixed(
            *(normed, *choice, experts.streamed, experts.exponents, buffers, None, tile, ranked),
            overlap=self._fused,
        )
