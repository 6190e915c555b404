"""Attention over pages on one CUDA device: the rotation, and of the kernels there are the one for a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention import fp8_hopper, prefill_hopper
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.fp8_hopper import HopperFp8DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.prefill_hopper import hopper_prefill_attention
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.dense.rope import rotation_table
from antiphon.kernels.fp8_pages import Fp8Pages, KvLayer
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import GptOssConfig


def rotation_of(config: GptOssConfig, device: torch.device) -> Tensor:
    """The model's YaRN rotation, as ``kernels.dense.rope.rotation_table`` gives it."""
    inv_freq, concentration = reference.yarn_inv_freq(
        config.head_dim,
        config.rope_theta,
        config.rope_scaling_factor,
        config.rope_original_context,
        config.rope_beta_fast,
        config.rope_beta_slow,
    )
    return rotation_table(inv_freq.to(device), concentration, config.max_context_tokens)


class PagedAttention:
    """Attention with sinks of so many heads; decode kernels and their buffers are kept by batch size.

    Args:
        query_heads: of this device; ``kv_heads`` likewise.
        hopper: whether the kernels made for Hopper may run.
        pdl: whether a decode launch may begin before the one ahead is over (programmatic dependent launch).
        overlap: whether a chunk's launch on Hopper may.
    """

    def __init__(
        self,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        hopper: bool,
        pdl: bool = False,
        overlap: bool = False,
    ) -> None:
        self._query_heads, self._kv_heads, self._head_dim = query_heads, kv_heads, head_dim
        self._device = device
        self._hopper, self._pdl, self._overlap = hopper, pdl, overlap
        self._decode: dict[int, DecodeAttention] = {}
        self._fp8_decode: dict[int, Fp8DecodeAttention | HopperFp8DecodeAttention] = {}
        self._wide = WidePages()

    def reserve_for_chunks(self, kv_layer: KvLayer, dtype: torch.dtype) -> None:
        """Have room for such a layer's pages in the queries' dtype, where it holds FP8."""
        if isinstance(kv_layer, Fp8Pages):
            self._wide.reserve(kv_layer, dtype)

    def __call__(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        sequences: PagedSequences,
        sinks: Tensor,
        window: int | None,
    ) -> Tensor:
        """query [T, Q, D] -> [T, Q, D], of chunks in its place. ``window``: None is a full layer.

        Only full layers may hold FP8. Decode kernels read such pages as they are; for the far more products
        of a chunk they are widened first. A step with sequences of both kinds takes both: a kernel of chunks
        would spend a tile of rows on the one query of a sequence that decodes.
        """
        if query.shape[0] == sequences.kv_len.shape[0]:
            return self._decoding(query, kv_layer, sequences, sinks, window)
        if (parts := sequences.parts()) is None:
            return self._chunks(query, kv_layer, sequences, sinks, window)
        front, behind = query[: sequences.decodes], query[sequences.decodes :]
        front.copy_(self._decoding(front, kv_layer, parts[0], sinks, window))
        self._chunks(behind, kv_layer, parts[1], sinks, window)
        return query

    def _chunks(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        sequences: PagedSequences,
        sinks: Tensor,
        window: int | None,
    ) -> Tensor:
        if isinstance(kv_layer, Fp8Pages):
            kv_layer = self._wide.widen(kv_layer, sequences, query.dtype)
        # Every sequence has at least one query token.
        longest = query.shape[0] - sequences.kv_len.shape[0] + 1
        # Every program reads the queries that it answers, and nobody else's, before it writes: the output
        # may take their place. So what stands at padding is finite.
        arguments = (query, kv_layer, sequences, sinks, window, self._head_dim**-0.5, longest)
        if self._hopper and kv_layer.shape[3] == prefill_hopper.PAGE:  # what that kernel is made for
            return hopper_prefill_attention(*arguments, out=query, overlap=self._overlap)
        return prefill_attention(*arguments, out=query)

    def _decoding(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        sequences: PagedSequences,
        sinks: Tensor,
        window: int | None,
    ) -> Tensor:
        tokens, scale = query.shape[0], self._head_dim**-0.5
        out = torch.empty_like(query)
        if isinstance(kv_layer, Fp8Pages):
            return self._fp8_kernel(tokens, kv_layer.page_size).full(
                query, kv_layer, sequences, sinks, scale, out
            )
        kernel = self._decode_kernel(tokens)
        if window is None:
            return kernel.full(query, kv_layer, sequences, sinks, scale, out)
        return kernel.sliding(query, kv_layer, sequences, sinks, window, scale, out)

    def _decode_kernel(self, batch_size: int) -> DecodeAttention:
        kernel = self._decode.get(batch_size)
        if kernel is None:
            kernel = self._decode[batch_size] = DecodeAttention(
                batch_size, self._query_heads, self._kv_heads, self._head_dim, self._device, pdl=self._pdl
            )
        return kernel

    def _fp8_kernel(self, batch_size: int, page_size: int) -> Fp8DecodeAttention | HopperFp8DecodeAttention:
        kernel = self._fp8_decode.get(batch_size)
        if kernel is None:
            if self._hopper and page_size == fp8_hopper.PAGE:
                kernel = HopperFp8DecodeAttention(batch_size, self._kv_heads, self._device, pdl=self._pdl)
            else:
                kernel = Fp8DecodeAttention(
                    batch_size, self._query_heads, self._kv_heads, self._head_dim, self._device
                )
            self._fp8_decode[batch_size] = kernel
        return kernel
