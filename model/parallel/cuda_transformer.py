"""The fast twin of ``model.parallel.transformer``: one rank of a GPT-OSS model on its GPU, in bf16.

As there, each rank computes its heads' and its experts' part, and a sum over ranks follows each half of a
layer. Here that sum, the residual and the norm behind it are one launch over peer memory for as many rows as
that is faster for, and a library's all-reduce with a fused add and norm for more rows. Which one is decided
by their number alone, so a decode step can be captured in a CUDA graph, by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels.attention import prefill_hopper
from antiphon.kernels.dense import skinny
from antiphon.kernels.dense.norm import add_rms_norm_, rms_norm
from antiphon.kernels.moe import chunk_norm
from antiphon.kernels.moe.streamed import DIM, SPLIT_COLUMNS
from antiphon.model.config import GptOssConfig
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_attention import AttentionBlock
from antiphon.model.cuda_roads import Road, hopper_obstacle
from antiphon.model.cuda_weights import (
    add_hopper_layers,
    collect_parameters,
    layer_experts,
    layer_weights,
)
from antiphon.model.forward import ForwardBatch, KvLayers
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.cuda_experts import HopperRankExperts, PortableRankExperts, RankExperts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.vocabulary import argmax_over_ranks, choose_over_ranks, top_k_over_ranks
from antiphon.protocol.errors import CheckpointError, ConfigError


class RowReduce(Protocol):
    """A sum over ranks with what follows it, up to ``max_rows`` rows; ``kernels.collectives.one_shot``."""

    max_rows: int

    def add_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
    ) -> Tensor:
        """``residual += sum of x over ranks`` in place, then its RMSNorm, which is returned."""

    def close(self) -> None:
        """Give back what the ranks share for it; every rank calls this, after its last sum."""


def takes_hopper_experts(config: GptOssConfig, layout: ParallelLayout, device: torch.device) -> bool:
    """Whether a rank's experts run on the kernels made for Hopper: whole or in columns, on an H200."""
    if device.type != "cuda" or hopper_obstacle(config, device) is not None:
        return False
    return layout.shape(config).inner_padded in (DIM, *SPLIT_COLUMNS)


class CudaRankTransformer:
    """One rank; implements ``model.parallel.commands.RankModel``.

    Args:
        config: the whole model's shape.
        layout: how it is spread, and which rank this is.
        communicator: of the ranks.
        parameters: this rank's, as ``model.parallel.load.read_shard`` gives them.
        device: this rank's.
        row_reduce: for steps of up to its ``max_rows`` tokens; absent, every sum takes the communicator.
        with_unembedding: False leaves the output projection out (prefill workers never sample).
        resident_fp8: where experts are dealt out whole on an H200, hold their FP8 form beside the 4-bit one.
        dtype: bfloat16; float32 where Triton interprets its kernels.
        fused: where the kernels for an H200 run, steps of up to 16 tokens take the projections made for them,
            short chunks are routed and ranked in one launch, and launches may begin while the ones ahead end.
            Not measured yet.
        converted: this rank's experts of all layers as Hopper's kernels read them, where it takes those (see
            ``takes_hopper_experts``); their matrices are then not among ``parameters``. None converts those.

    Raises:
        CheckpointError: a parameter is missing, surplus or given twice.
        ConfigError: the model cannot be spread this way, or the communicator is another rank's.
        KernelLibraryError: kernels for this shape were not built.
    """

    def __init__(
        self,
        config: GptOssConfig,
        layout: ParallelLayout,
        communicator: Communicator,
        parameters: Iterable[tuple[str, Tensor]],
        device: torch.device,
        *,
        row_reduce: RowReduce | None = None,
        with_unembedding: bool = True,
        resident_fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        converted: Sequence[ConvertedExperts] | None = None,
        fused: bool = False,
    ) -> None:
        if (communicator.rank, communicator.size) != (layout.rank, layout.tensor_parallel):
            raise ConfigError(
                f"the layout is rank {layout.rank} of {layout.tensor_parallel}, "
                f"the communicator rank {communicator.rank} of {communicator.size}"
            )
        self.config, self.layout, self.device = config, layout, device
        self.dtype = dtype
        self.shape = layout.shape(config)
        self._communicator = communicator
        self._row_reduce = row_reduce
        self._on_hopper = device.type == "cuda" and hopper_obstacle(config, device) is None
        self._fused = self._on_hopper and fused
        if self._on_hopper:
            prefill_hopper.LIBRARY.load()
        if self._fused:
            skinny.LIBRARY.load()
        tensors = collect_parameters(parameters, device, not with_unembedding, dtype)
        self._embedding = tensors.pop("embedding.weight")
        self._norm = tensors.pop("norm.scale")
        self._unembedding = tensors.pop("unembedding.weight") if with_unembedding else None
        self._layers = [layer_weights(tensors, layer) for layer in range(config.num_hidden_layers)]
        self._add_rms_norm_: Callable[[Tensor, Tensor, Tensor, float], Tensor] = add_rms_norm_
        self._experts = self._make_experts(tensors, converted, resident_fp8)
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))}: the model has no such parameter")
        self._attention = AttentionBlock(
            *(config, device, Road.HOPPER if self._on_hopper else Road.PORTABLE),
            heads=(len(self.shape.heads), len(self.shape.kv_heads)),
            few_tokens=self._fused,
            overlap=self._fused,
        )

    def _make_experts(
        self,
        tensors: dict[str, Tensor],
        converted: Sequence[ConvertedExperts] | None,
        resident_fp8: bool,
    ) -> RankExperts:
        layers = self.config.num_hidden_layers
        if takes_hopper_experts(self.config, self.layout, self.device):
            self._add_rms_norm_ = chunk_norm.add_rms_norm_  # a launch of Triton's costs the host more
            hopper = HopperRankExperts(self.config, self.shape, self.device, resident_fp8, self._fused)
            add_hopper_layers(hopper, tensors, layers, converted)
            return hopper
        if converted is not None:
            raise ValueError(f"converted experts are of no use to {self.layout.name} on {self.device}")
        portable = PortableRankExperts(self.config, self.shape.experts)
        for layer in range(layers):
            portable.add_layer(layer_experts(tensors, layer))
        return portable

    @property
    def road(self) -> str:
        """Which kernels run, in words for the log."""
        sums = "the communicator"
        if self._row_reduce is not None:
            sums = f"peer memory up to {self._row_reduce.max_rows} rows"
        fused = ", fused launches" if self._fused else ""
        return f"{self.layout.name}, {self._experts.road} experts, sums over {sums}{fused}"

    @property
    def inexact_blocks(self) -> tuple[int, int]:
        """Blocks of this rank's expert weights that may lose bits in long chunks, and all."""
        return self._experts.inexact_blocks, self._experts.blocks

    def reserve(self, tokens: int) -> None:
        """See ``model.forward.ReservesBuffers``."""
        self._experts.reserve(tokens)

    def reserve_for_chunks(self, kv: KvLayers) -> None:
        """See ``model.forward.ReservesForPages``; all full layers use the same room."""
        for layer in self.config.full_layers[:1]:
            self._attention.reserve_for_chunks(kv.layer(layer), self.dtype)

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write this rank's KV, return final-norm hidden states [T, H]; ``after_layer(i)`` runs after it.

        Without an output projection the last layer ends with its keys and values, and what is returned is of
        no use.
        """
        x, normed = self._embed(batch.token_ids)
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
            normed = self._add_norm(self._attention.output_part(mixed, weights), x, weights.mlp_norm)
            following = self._layers[index + 1].attn_norm if index + 1 < len(self._layers) else self._norm
            normed = self._add_norm(
                self._experts.delta(index, normed, batch.full.query_start[-1:]), x, following
            )
            if after_layer is not None:
                after_layer(index)
        return normed

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32, on every rank.

        Raises:
            RuntimeError: the model was built without its output projection.
        """
        parts = self._communicator.all_gather(self._local_logits(hidden))  # [ranks, M, V / ranks]
        return parts.transpose(0, 1).reshape(hidden.shape[0], self.config.vocab_size)

    @torch.no_grad()
    def greedy(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M] int64: the lowest id among the highest logits, without gathering the logits."""
        return argmax_over_ranks(self._local_logits(hidden), self.shape.vocabulary.start, self._communicator)

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[M, H] -> the k best logits [M, k] float32 and their ids [M, k] int64; see ``top_k_over_ranks``."""
        return top_k_over_ranks(
            self._local_logits(hidden), self.shape.vocabulary.start, k, self._communicator
        )

    @torch.no_grad()
    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """See ``model.forward.ChoosesTokens``; the logits stay where they are."""
        return choose_over_ranks(
            self._local_logits(hidden), self.shape.vocabulary.start, self._communicator, draws
        )

    def stop_sharing(self) -> None:
        """See ``model.parallel.commands.SharesMemory``."""
        if self._row_reduce is not None:
            self._row_reduce.close()

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common, by name."""
        return {
            **asdict(self.config),
            "tensor_parallel": self.layout.tensor_parallel,
            "expert_parallel": self.layout.expert_parallel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "with_unembedding": self._unembedding is not None,
            "experts": self._experts.road,
            "row_reduce_rows": 0 if self._row_reduce is None else self._row_reduce.max_rows,
        }

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> embeddings [T, H], and their norm for the first layer."""
        rows = self.shape.vocabulary
        mine = (token_ids >= rows.start) & (token_ids < rows.stop)
        part = torch.nn.functional.embedding(torch.where(mine, token_ids - rows.start, 0), self._embedding)
        part.masked_fill_(~mine[:, None], 0.0)  # another rank holds the token
        weight, eps = self._layers[0].attn_norm, self.config.rms_norm_eps
        if self._row_reduce is not None and part.shape[0] <= self._row_reduce.max_rows:
            x = torch.zeros_like(part)
            return x, self._row_reduce.add_norm_(part, x, weight, eps, self._fused)
        x = self._communicator.all_reduce(part)
        return x, rms_norm(x, weight, eps)

    def _add_norm(self, delta: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """``x += sum of delta over ranks`` in place, and its norm."""
        eps = self.config.rms_norm_eps
        if self._row_reduce is not None and x.shape[0] <= self._row_reduce.max_rows:
            return self._row_reduce.add_norm_(delta, x, weight, eps, self._fused)
        return self._add_rms_norm_(self._communicator.all_reduce(delta), x, weight, eps)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V / ranks] float32."""
        if self._unembedding is None:
            raise RuntimeError("this model was loaded without its output projection; it cannot sample")
        if self._fused and hidden.shape[0] <= skinny.MAX_TOKENS:
            out = torch.empty(
                hidden.shape[0], self._unembedding.shape[0], dtype=torch.float32, device=hidden.device
            )
            return skinny.logits(hidden.contiguous(), self._unembedding, out, pdl=True)
        if hidden.device.type == "cuda":
            return torch.mm(hidden, self._unembedding.t(), out_dtype=torch.float32)
        return torch.mm(hidden.float(), self._unembedding.float().t())
