"""The fast twin of ``model.transformer.Transformer`` on one CUDA device: bf16, 4-bit experts, fused kernels.

Which kernels run is decided once, from the shape of the model, and can be read in ``road``; nothing changes
roads silently afterwards. Names of weights are those of OpenAI's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from antiphon.kernels.dense import skinny
from antiphon.kernels.dense.norm import rms_norm
from antiphon.model.config import GptOssConfig
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_attention import AttentionBlock
from antiphon.model.cuda_experts import ExpertLayers, HopperExpertLayers, PortableExpertLayers
from antiphon.model.cuda_roads import ChunkChoices, Road, choose_road, hopper_obstacle, load_libraries
from antiphon.model.cuda_weights import (
    add_hopper_layers,
    collect_parameters,
    layer_experts,
    layer_weights,
    with_fp8_projections,
)
from antiphon.model.forward import ForwardBatch, KvLayers
from antiphon.protocol.errors import CheckpointError


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
        converted: all layers' experts in the form of the HOPPER road, whose matrices are then not among
            ``parameters``; None converts those.
        chunks: on the HOPPER road, how long chunks are multiplied; None takes the defaults.

    Raises:
        CheckpointError: a parameter is missing, surplus or given twice.
        ValueError: HOPPER was asked for and cannot serve this shape or device, or another road is given
            converted experts or choices.
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
        converted: Sequence[ConvertedExperts] | None = None,
        chunks: ChunkChoices | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.road = choose_road(config, self.device) if road is None else road
        if self.road is Road.HOPPER:
            reason = hopper_obstacle(config, self.device)
            if reason is not None:
                raise ValueError(f"the Hopper kernels cannot run this model: {reason}")
            load_libraries()
        elif converted is not None or chunks is not None:
            raise ValueError(f"converted experts and choices are of no use to the {self.road} road")
        self.chunks = chunks = chunks or ChunkChoices()
        tensors = collect_parameters(parameters, self.device, skip_unembedding=not with_unembedding)
        self._embedding = tensors.pop("embedding.weight")
        self._norm = tensors.pop("norm.scale").bfloat16()
        self._unembedding = tensors.pop("unembedding.weight") if with_unembedding else None
        layers = config.num_hidden_layers
        self._layers = [layer_weights(tensors, layer) for layer in range(layers)]
        if chunks.fp8_projections:
            self._layers = [with_fp8_projections(weights) for weights in self._layers]
        self._experts: ExpertLayers
        if self.road is Road.HOPPER:
            self._experts = hopper = HopperExpertLayers(config, self.device, resident_fp8, chunks)
            add_hopper_layers(hopper, tensors, layers, converted)
        else:
            self._experts = PortableExpertLayers(config)
            for layer in range(layers):
                self._experts.add_layer(layer_experts(tensors, layer))
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))}: the model has no such parameter")
        self._attention = AttentionBlock(config, self.device, self.road)

    def sharing(self, resident_fp8: bool, chunks: ChunkChoices) -> CudaTransformer:
        """The same weights, multiplied otherwise, so that ways can be compared without loading again.

        Raises:
            ValueError: this model is not on the HOPPER road, or has no FP8 experts that could be resident.
        """
        if not isinstance(self._experts, HopperExpertLayers):
            raise ValueError(f"a model on the {self.road} road has one way to multiply")
        twin = copy(self)
        twin.chunks = chunks
        twin._experts = self._experts.sharing(resident_fp8, chunks)
        twin._attention = AttentionBlock(self.config, self.device, self.road)
        twin._layers = [
            with_fp8_projections(weights) if chunks.fp8_projections else replace(weights, fp8=None)
            for weights in self._layers
        ]
        return twin

    def reserve(self, tokens: int) -> None:
        """See ``model.forward.ReservesBuffers``."""
        self._experts.reserve(tokens)
        self._attention.reserve(tokens, self._layers[0])

    def reserve_for_chunks(self, kv: KvLayers) -> None:
        """See ``model.forward.ReservesForPages``; all full layers use the same room."""
        for layer in self.config.full_layers[:1]:
            self._attention.reserve_for_chunks(kv.layer(layer), torch.bfloat16)

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
            mixed = self._attention.attend(
                normed, weights, batch.positions, kv.layer(index), sequences, window
            )
            if self._unembedding is None and index + 1 == len(self._layers):
                # Nobody samples from this model, and the last layer's keys and values are in their pages.
                if after_layer is not None:
                    after_layer(index)
                return normed
            mlp_input = self._attention.add_output_(x, mixed, weights)
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
