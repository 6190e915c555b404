"""A GPT-OSS model's tensors on a CUDA device, taken by their names out of what a checkpoint gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels.dense.fp8_projection import Fp8Projection
from antiphon.kernels.reference import ExpertMatrix
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_experts import CheckpointExperts
from antiphon.protocol.errors import CheckpointError


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
    fp8: Fp8Projections | None = None


@dataclass(frozen=True, slots=True)
class Fp8Projections:
    """The attention's projections of one layer in FP8, beside the bf16 ones that short steps take."""

    qkv: Fp8Projection
    out: Fp8Projection


def with_fp8_projections(weights: LayerWeights) -> LayerWeights:
    """The same layer with its projections rounded to FP8 as well.

    Raises:
        ValueError: no kernel is built for such shapes.
    """
    qkv = Fp8Projection.from_weight(weights.qkv_weight, weights.qkv_bias)
    return replace(
        weights, fp8=Fp8Projections(qkv, Fp8Projection.from_weight(weights.out_weight, weights.out_bias))
    )


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


def layer_router(tensors: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """One layer's router weight and bias, taken out of ``tensors``.

    Raises:
        CheckpointError: one is missing.
    """
    return _take(tensors, layer, "mlp.gate.weight"), _take(tensors, layer, "mlp.gate.bias")


class HopperLayers(Protocol):
    """Layers of experts on the Hopper road."""

    def add_layer(self, experts: CheckpointExperts) -> None:
        """Convert the next layer."""

    def add_converted(self, gate_weight: Tensor, gate_bias: Tensor, experts: ConvertedExperts) -> None:
        """Take the next layer as it is computed with."""


def add_hopper_layers(
    layers: HopperLayers,
    tensors: dict[str, Tensor],
    count: int,
    converted: Sequence[ConvertedExperts] | None,
) -> None:
    """Give ``layers`` the routers out of ``tensors``, and the experts: converted, or out of them too.

    Raises:
        CheckpointError: a tensor is missing.
        ValueError: there are more or fewer converted layers than the model has.
    """
    if converted is not None and len(converted) != count:
        raise ValueError(f"converted experts of {len(converted)} layers for a model of {count}")
    for layer in range(count):
        if converted is None:
            layers.add_layer(layer_experts(tensors, layer))
        else:
            layers.add_converted(*layer_router(tensors, layer), converted[layer])
