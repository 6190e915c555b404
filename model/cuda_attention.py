"""The attention half of every layer on one CUDA device: both projections, rotation, pages, attention."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from antiphon.kernels.attention.fp8_hopper import FewTokens
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write
from antiphon.kernels.dense import fp8_projection, skinny
from antiphon.kernels.dense.fp8_projection import Fp8Projection, ProjectionWorkspace
from antiphon.kernels.dense.norm import add_rms_norm_
from antiphon.kernels.dense.rope import rope_and_write
from antiphon.kernels.fp8_pages import Fp8Pages, KvLayer
from antiphon.kernels.moe import chunk_norm
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_paged_attention import PagedAttention, rotation_of
from antiphon.model.cuda_roads import Road
from antiphon.model.cuda_weights import LayerWeights
from antiphon.model.workspaces import Workspaces


class AttentionBlock:
    """What layers have in common: the rotation, attention over pages, and buffers of FP8 projections.

    Args:
        heads: of queries, and of keys and values, on this device; None: all of the model's.
        few_tokens: up to 16 tokens take the projections made for them, and decode launches may begin while
            the ones ahead end; on the Hopper road.
        overlap: so may rotation and attention behind a projection of more tokens.
    """

    def __init__(
        self,
        config: GptOssConfig,
        device: torch.device,
        road: Road,
        *,
        heads: tuple[int, int] | None = None,
        few_tokens: bool = True,
        overlap: bool = False,
    ) -> None:
        self._config, self._device = config, device
        self._heads, self._kv_heads = heads or (config.num_attention_heads, config.num_key_value_heads)
        self._hopper = road is Road.HOPPER
        self._few = self._hopper and few_tokens
        self._overlap = overlap
        self._rotation = rotation_of(config, device)
        self._attention = PagedAttention(
            *(self._heads, self._kv_heads, config.head_dim, device),
            hopper=self._hopper,
            pdl=self._few,
            overlap=overlap,
        )
        self._fp8_buffers = Workspaces(partial(ProjectionWorkspace, device=device))

    def reserve(self, tokens: int, weights: LayerWeights) -> None:
        """Have buffers for so many tokens of such layers that never move."""
        if weights.fp8 is not None and tokens >= fp8_projection.MIN_TOKENS:
            self._fp8_buffers.reserve(tokens)

    def reserve_for_chunks(self, kv_layer: KvLayer, dtype: torch.dtype) -> None:
        """Have what chunks need besides such a full layer's pages."""
        self._attention.reserve_for_chunks(kv_layer, dtype)

    def attend(
        self,
        normed: Tensor,
        weights: LayerWeights,
        positions: Tensor,
        kv_layer: KvLayer,
        sequences: PagedSequences,
        window: int | None,
    ) -> Tensor:
        """QKV, rotation, page write, attention. normed [T, H] -> [T, Q, D]."""
        tokens = normed.shape[0]
        shape = tokens, self._heads, self._config.head_dim
        query = torch.empty(*shape, dtype=normed.dtype, device=normed.device)
        if self._skinny(tokens):
            self._project_few(normed, weights, positions, kv_layer, sequences.slot, query)
        else:
            fp8 = None if weights.fp8 is None else weights.fp8.qkv
            qkv = self._project(normed, weights.qkv_weight, weights.qkv_bias, fp8)
            rotation = (qkv, positions, sequences.slot, self._rotation, kv_layer)
            if self._hopper:
                chunk_rope_and_write(*rotation, query, self._overlap)
            else:
                rope_and_write(*rotation, self._heads, query)
        return self._attention(query, kv_layer, sequences, weights.sinks, window)

    def _project_few(
        self,
        normed: Tensor,
        weights: LayerWeights,
        positions: Tensor,
        kv_layer: KvLayer,
        slot: Tensor,
        query: Tensor,
    ) -> None:
        """QKV, rotation and page write of at most 16 tokens; to FP8 pages by way of ``FewTokens``."""
        projection = (normed, weights.qkv_weight, weights.qkv_bias, positions)
        if isinstance(kv_layer, Fp8Pages):
            few = self._few_tokens
            place = few.slot[: slot.shape[0]]
            skinny.qkv_rope(*projection, place, self._rotation, few.kv, query, pdl=True)
            few.store(kv_layer, slot, pdl=True)
            return
        skinny.qkv_rope(*projection, slot, self._rotation, kv_layer, query, pdl=True)

    @cached_property
    def _few_tokens(self) -> FewTokens:
        """All layers' room; steps are warmed up before they are captured."""
        return FewTokens(self._kv_heads, self._device)

    def add_output_(self, x: Tensor, mixed: Tensor, weights: LayerWeights) -> Tensor | None:
        """``x += mixed W^T + b`` in place; returns its norm, or None where the router norms x itself."""
        mixed = mixed.view(x.shape[0], -1)
        if self._skinny(x.shape[0]):
            skinny.output_projection_(mixed, weights.out_weight, weights.out_bias, x, pdl=True)
            return None
        fp8 = None if weights.fp8 is None else weights.fp8.out
        delta = self._project(mixed, weights.out_weight, weights.out_bias, fp8)
        add_norm = chunk_norm.add_rms_norm_ if self._hopper else add_rms_norm_
        return add_norm(delta, x, weights.mlp_norm, self._config.rms_norm_eps)

    def output_part(self, mixed: Tensor, weights: LayerWeights) -> Tensor:
        """``mixed W^T + b`` [T, H] of this device's heads, before a sum over ranks."""
        mixed = mixed.view(mixed.shape[0], -1)
        if self._skinny(mixed.shape[0]) and mixed.shape[1] in skinny.PART_WIDTHS:
            return skinny.partial_projection(mixed, weights.out_weight, weights.out_bias, pdl=True)
        return torch.nn.functional.linear(mixed, weights.out_weight, weights.out_bias)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor, fp8: Fp8Projection | None) -> Tensor:
        if fp8 is not None and x.shape[0] >= fp8_projection.MIN_TOKENS:
            return fp8_projection.project(x, fp8, self._fp8_buffers.of(x.shape[0]))
        return torch.nn.functional.linear(x, weight, bias)

    def _skinny(self, tokens: int) -> bool:
        return self._few and tokens <= skinny.MAX_TOKENS
