"""The fast twin of ``model.transformer.Transformer`` on one CUDA device: bf16, 4-bit experts, fused kernels.

Which kernels run is decided once, from the shape of the model, and can be read in ``road``; nothing changes
roads silently afterwards. Names of weights are those of OpenAI's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention import prefill_hopper
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write, hopper_prefill_attention
from antiphon.kernels.dense import skinny
from antiphon.kernels.dense.norm import add_rms_norm_, rms_norm
from antiphon.kernels.dense.rope import rope_and_write, rotation_table
from antiphon.kernels.moe import build as moe_build
from antiphon.kernels.moe import chunk_norm
from antiphon.kernels.moe.decode import SWIGLU_LIMIT
from antiphon.kernels.moe.expert_range import MAX_EXPERTS, TOP_K
from antiphon.kernels.reference import ExpertMatrix, PagedSequences
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.checkpoint.load import read_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_experts import (
    CheckpointExperts,
    ExpertLayers,
    HopperExpertLayers,
    PortableExpertLayers,
)
from antiphon.model.forward import ForwardBatch, KvLayers
from antiphon.protocol.errors import CheckpointError


class Road(StrEnum):
    """Which family of kernels a model runs on."""

    HOPPER = "hopper"
    """Kernels made for the published models' shape on sm_90."""
    PORTABLE = "portable"
    """Triton and cuBLAS, for any shape."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors on the device, experts apart; shapes as in ``model.transformer``."""

    attn_norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    out_weight: Tensor
    out_bias: Tensor
    mlp_norm: Tensor


class CudaTransformer:
    """A whole GPT-OSS model on one GPU; implements ``model.forward.LanguageModel``.

    Args:
        config: the shape.
        parameters: (OpenAI's name, tensor) as from ``model.checkpoint.load.read_parameters``; taken one at a
            time, so that host memory stays small.
        device: a CUDA device.
        with_unembedding: False leaves the output projection out (prefill workers never sample).
        road: None chooses HOPPER where shape and device allow it.
        resident_fp8: on the HOPPER road, hold FP8 experts for long chunks beside the 4-bit ones; False widens
            those while it multiplies, for models that fill the device.

    Raises:
        CheckpointError: a parameter is missing, surplus or given twice.
        ValueError: HOPPER was asked for and cannot serve this shape or device.
        KernelLibraryError: HOPPER's kernels were not built.
    """

    def __init__(
        self,
        config: GptOssConfig,
        parameters: Iterable[tuple[str, Tensor]],
        device: torch.device | str = "cuda",
        with_unembedding: bool = True,
        road: Road | None = None,
        resident_fp8: bool = False,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.road = _choose_road(config, self.device) if road is None else road
        if self.road is Road.HOPPER:
            reason = hopper_obstacle(config, self.device)
            if reason is not None:
                raise ValueError(f"the Hopper kernels cannot run this model: {reason}")
            skinny.LIBRARY.load()
            moe_build.LIBRARY.load()
            prefill_hopper.LIBRARY.load()
        tensors = collect_parameters(parameters, self.device, skip_unembedding=not with_unembedding)
        self._embedding = tensors.pop("embedding.weight")
        self._norm = tensors.pop("norm.scale").bfloat16()
        self._unembedding = tensors.pop("unembedding.weight") if with_unembedding else None
        hopper = self.road is Road.HOPPER
        self._experts: ExpertLayers = (
            HopperExpertLayers(config, self.device, resident_fp8) if hopper else PortableExpertLayers(config)
        )
        self._layers = []
        for layer in range(config.num_hidden_layers):
            self._layers.append(layer_weights(tensors, layer))
            self._experts.add_layer(layer_experts(tensors, layer))
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))}: the model has no such parameter")
        inv_freq, concentration = reference.yarn_inv_freq(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling_factor,
            config.rope_original_context,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        self._rotation = rotation_table(inv_freq.to(self.device), concentration, config.max_context_tokens)
        self._decode_attention: dict[int, DecodeAttention] = {}

    def reserve(self, tokens: int) -> None:
        """See ``model.forward.ReservesBuffers``."""
        self._experts.reserve(tokens)

    @property
    def inexact_blocks(self) -> tuple[int, int]:
        """Blocks of expert weights that may lose bits in long chunks, and all; see ``ExpertLayers``."""
        return self._experts.inexact_blocks, self._experts.blocks

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write the batch's KV, return final-norm hidden states [T, H]; ``after_layer(i)`` runs after it.

        Without an output projection the last layer ends with its keys and values, and what is returned is of
        no use.

        A batch of one token per sequence takes the decode kernels. Nothing here synchronises with the host,
        and what is launched depends on shapes alone, so any batch in fixed memory can be captured in CUDA
        graphs. Tokens beyond ``query_start[B]`` are padding; what is returned for them is of no use.
        """
        eps = self.config.rms_norm_eps
        x = torch.nn.functional.embedding(batch.token_ids, self._embedding)
        normed = rms_norm(x, self._layers[0].attn_norm, eps)
        live = batch.full.query_start[-1:]
        for index, weights in enumerate(self._layers):
            window = self.config.sliding_window if self.config.is_sliding(index) else None
            sequences = batch.full if window is None else batch.sliding
            mixed = self._attention(normed, weights, batch.positions, kv.layer(index), sequences, window)
            if self._unembedding is None and index + 1 == len(self._layers):
                # Nobody samples from this model, and the last layer's keys and values are in their pages.
                if after_layer is not None:
                    after_layer(index)
                return normed
            mlp_input = self._output_projection(x, mixed, weights)
            following = self._layers[index + 1].attn_norm if index + 1 < len(self._layers) else self._norm
            x, normed = self._experts.forward(index, x, mlp_input, weights.mlp_norm, following, live)
            if after_layer is not None:
                after_layer(index)
        return normed

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32.

        Raises:
            RuntimeError: the model was built without its output projection.
        """
        if self._unembedding is None:
            raise RuntimeError("this model was loaded without its output projection; it cannot sample")
        if self.road is Road.HOPPER and hidden.shape[0] <= skinny.MAX_TOKENS:
            out = torch.empty(
                hidden.shape[0], self.config.vocab_size, dtype=torch.float32, device=hidden.device
            )
            return skinny.logits(hidden.contiguous(), self._unembedding, out, pdl=True)
        return torch.mm(hidden, self._unembedding.t(), out_dtype=torch.float32)

    def _attention(
        self,
        normed: Tensor,
        weights: LayerWeights,
        positions: Tensor,
        kv_layer: Tensor,
        sequences: PagedSequences,
        window: int | None,
    ) -> Tensor:
        """QKV, rotation, page write, attention. normed [T, H] -> [T, Q, D]."""
        tokens = normed.shape[0]
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        query = torch.empty(tokens, heads, dim, dtype=normed.dtype, device=normed.device)
        if self._skinny(tokens):
            skinny.qkv_rope(
                *(normed, weights.qkv_weight, weights.qkv_bias, positions, sequences.slot),
                *(self._rotation, kv_layer, query),
                pdl=True,
            )
        else:
            qkv = torch.nn.functional.linear(normed, weights.qkv_weight, weights.qkv_bias)
            rotation = (qkv, positions, sequences.slot, self._rotation, kv_layer)
            if self.road is Road.HOPPER:
                chunk_rope_and_write(*rotation, query)
            else:
                rope_and_write(*rotation, heads, query)
        scale = dim**-0.5
        sequence_count = sequences.kv_len.shape[0]
        if tokens != sequence_count:
            longest = tokens - sequence_count + 1  # every sequence has at least one query token
            # The CUDA kernel is made for pages of 64 positions.
            fast = self.road is Road.HOPPER and kv_layer.shape[3] == prefill_hopper.PAGE
            attend = hopper_prefill_attention if fast else prefill_attention
            # Every program reads the queries that it answers, and nobody else's, before it writes: the output
            # may take their place. So what stands at padding is finite.
            return attend(query, kv_layer, sequences, weights.sinks, window, scale, longest, out=query)
        kernel = self._decode_kernel(tokens)
        out = torch.empty_like(query)
        if window is None:
            return kernel.full(query, kv_layer, sequences, weights.sinks, scale, out)
        return kernel.sliding(query, kv_layer, sequences, weights.sinks, window, scale, out)

    def _output_projection(self, x: Tensor, mixed: Tensor, weights: LayerWeights) -> Tensor | None:
        """``x += mixed W^T + b`` in place; returns its norm, or None where the router norms x itself."""
        mixed = mixed.view(x.shape[0], -1)
        if self._skinny(x.shape[0]):
            skinny.output_projection_(mixed, weights.out_weight, weights.out_bias, x, pdl=True)
            return None
        delta = torch.nn.functional.linear(mixed, weights.out_weight, weights.out_bias)
        add_norm = chunk_norm.add_rms_norm_ if self.road is Road.HOPPER else add_rms_norm_
        return add_norm(delta, x, weights.mlp_norm, self.config.rms_norm_eps)

    def _skinny(self, tokens: int) -> bool:
        return self.road is Road.HOPPER and tokens <= skinny.MAX_TOKENS

    def _decode_kernel(self, batch_size: int) -> DecodeAttention:
        kernel = self._decode_attention.get(batch_size)
        if kernel is None:
            kernel = DecodeAttention(
                batch_size,
                self.config.num_attention_heads,
                self.config.num_key_value_heads,
                self.config.head_dim,
                self.device,
                pdl=self.road is Road.HOPPER,
            )
            self._decode_attention[batch_size] = kernel
        return kernel


def hopper_obstacle(config: GptOssConfig, device: torch.device) -> str | None:
    """Why the kernels made for Hopper cannot run this model here; None when they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"{device} is sm_{capability[0]}{capability[1]}, they need sm_90"
    return hopper_shape_obstacle(config)


def hopper_shape_obstacle(config: GptOssConfig) -> str | None:
    """What of the model's shape those kernels are not made for; None when nothing. Needs no GPU."""
    made_for = {
        "hidden_size": skinny.HIDDEN,
        "intermediate_size": skinny.HIDDEN,
        "num_attention_heads": skinny.QUERY_WIDTH // prefill_hopper.HEAD_DIM,
        "num_key_value_heads": skinny.QUERY_WIDTH // prefill_hopper.HEAD_DIM // prefill_hopper.GROUP,
        "head_dim": prefill_hopper.HEAD_DIM,
        "experts_per_token": TOP_K,
        "swiglu_limit": SWIGLU_LIMIT,
    }
    for name, value in made_for.items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)}, they are made for {value}"
    if config.num_experts > MAX_EXPERTS:
        return f"num_experts is {config.num_experts}, they are made for at most {MAX_EXPERTS}"
    if config.sliding_window < prefill_hopper.PAGE:
        return f"sliding_window is {config.sliding_window}, they are made for at least {prefill_hopper.PAGE}"
    return None


def _choose_road(config: GptOssConfig, device: torch.device) -> Road:
    return Road.HOPPER if hopper_obstacle(config, device) is None else Road.PORTABLE


def collect_parameters(
    parameters: Iterable[tuple[str, Tensor]],
    device: torch.device,
    skip_unembedding: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """Tensors by name on a device, in ``dtype`` but for what is packed.

    Raises:
        CheckpointError: one is given twice.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if skip_unembedding and name == "unembedding.weight":
            continue
        if name in tensors:
            raise CheckpointError(f"{name}: given twice")
        held = tensor.dtype if tensor.dtype is torch.uint8 else dtype
        tensors[name] = tensor.to(device, held).contiguous()
    return tensors


def _take(tensors: dict[str, Tensor], layer: int, name: str) -> Tensor:
    full = f"block.{layer}.{name}"
    try:
        return tensors.pop(full)
    except KeyError:
        raise CheckpointError(f"{full}: not given") from None


def layer_weights(tensors: dict[str, Tensor], layer: int) -> LayerWeights:
    """One layer's, taken out of ``tensors``.

    Raises:
        CheckpointError: one is missing.
    """
    take = partial(_take, tensors, layer)
    return LayerWeights(
        attn_norm=take("attn.norm.scale"),
        qkv_weight=take("attn.qkv.weight"),
        qkv_bias=take("attn.qkv.bias"),
        sinks=take("attn.sinks").float(),
        out_weight=take("attn.out.weight"),
        out_bias=take("attn.out.bias"),
        mlp_norm=take("mlp.norm.scale"),
    )


def layer_experts(tensors: dict[str, Tensor], layer: int) -> CheckpointExperts:
    """One layer's, taken out of ``tensors``.

    Raises:
        CheckpointError: one is missing.
    """
    take = partial(_take, tensors, layer)
    return CheckpointExperts(
        gate_weight=take("mlp.gate.weight"),
        gate_bias=take("mlp.gate.bias"),
        gate_up=ExpertMatrix(take("mlp.mlp1_weight.blocks"), take("mlp.mlp1_weight.scales")),
        gate_up_bias=take("mlp.mlp1_bias"),
        down=ExpertMatrix(take("mlp.mlp2_weight.blocks"), take("mlp.mlp2_weight.scales")),
        down_bias=take("mlp.mlp2_bias"),
    )


def load_cuda_model(
    directory: Path,
    device: torch.device | str = "cuda",
    with_unembedding: bool = True,
    resident_fp8: bool = False,
) -> CudaTransformer:
    """Read a checkpoint of either layout into the fast model.

    Raises:
        CheckpointError: see ``open_checkpoint`` and ``read_parameters``.
        KernelLibraryError: the kernels for this model's shape were not built.
    """
    index = open_checkpoint(directory)
    skip = frozenset[TensorKind]() if with_unembedding else frozenset({TensorKind.UNEMBEDDING})
    parameters = read_parameters(index, skip)
    return CudaTransformer(index.config, parameters, device, with_unembedding, resident_fp8=resident_fp8)
