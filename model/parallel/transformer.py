"""GPT-OSS over several ranks in plain torch: the blocks of ``model.transformer``, and sums between them.

Each rank computes its heads' part of attention's output projection and its part of the experts' weighted sum;
one all-reduce after each makes the residual stream whole again on every rank. Biases that are added after
such a sum are held by rank 0 and are zero elsewhere, so that they are added once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import cast

import torch
from torch import Tensor, nn

from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch, KvLayers
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.vocabulary import argmax_over_ranks, choose_over_ranks, top_k_over_ranks
from antiphon.model.transformer import Embedding, Linear, RMSNorm, TransformerBlock, Yarn
from antiphon.protocol.errors import ConfigError


class ParallelTransformer(nn.Module):
    """One rank of a GPT-OSS model; implements ``model.forward.LanguageModel``.

    All ranks call the same methods in the same order with the same arguments (KV pages apart: each rank has
    its own, of ``len(shape.kv_heads)`` heads), and all get the same results, bit for bit.

    Args:
        config: the whole model's shape.
        layout: how it is spread, and which rank this is.
        communicator: of ``layout.tensor_parallel`` ranks.
        dtype: float32 or bfloat16, of weights, activations and keys and values; sums over ranks are taken in
            it too.
        device: where every tensor lives.
        with_unembedding: False leaves the output projection out (prefill workers never sample).

    Weights are uninitialised memory until ``model.checkpoint.load.fill`` has run with this rank's parameters.

    Raises:
        ConfigError: the model cannot be spread this way, or the communicator is another rank's.
    """

    def __init__(
        self,
        config: GptOssConfig,
        layout: ParallelLayout,
        communicator: Communicator,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        with_unembedding: bool = True,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
        if (communicator.rank, communicator.size) != (layout.rank, layout.tensor_parallel):
            raise ConfigError(
                f"the layout is rank {layout.rank} of {layout.tensor_parallel}, "
                f"the communicator rank {communicator.rank} of {communicator.size}"
            )
        device = torch.device(device)
        self.config = config
        self.layout = layout
        self.communicator = communicator
        self.shape = layout.shape(config)
        self.dtype = dtype
        self.device = device
        self.yarn = Yarn(config, device)
        rows = len(self.shape.vocabulary)
        self.embedding = Embedding(rows, config.hidden_size, dtype, device)
        self.block = nn.ModuleList(
            TransformerBlock(config, layer, dtype, device, self.shape)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.unembedding = (
            Linear(config.hidden_size, rows, dtype, device, bias=False) if with_unembedding else None
        )

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write this rank's KV, return final-norm hidden states [T, H]; ``after_layer(i)`` runs after it."""
        reduce = self.communicator.all_reduce
        x = reduce(self._embed(batch.token_ids))
        for layer, block in enumerate(self.blocks):
            sequences = batch.sliding if self.config.is_sliding(layer) else batch.full
            x = x + reduce(block.attn.delta(x, batch.positions, self.yarn, kv.layer(layer), sequences))
            x = x + reduce(block.mlp.delta(x))
            if after_layer is not None:
                after_layer(layer)
        return cast(Tensor, self.norm(x))

    @property
    def blocks(self) -> Iterator[TransformerBlock]:
        """This rank's part of every layer, in order."""
        return (cast(TransformerBlock, block) for block in self.block)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H], zero where another rank holds the token."""
        rows = self.shape.vocabulary
        mine = (token_ids >= rows.start) & (token_ids < rows.stop)
        x = self.embedding(torch.where(mine, token_ids - rows.start, 0))
        return cast(Tensor, x.masked_fill_(~mine[:, None], 0.0))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32, on every rank.

        Raises:
            RuntimeError: the model was built without its output projection.
        """
        parts = self.communicator.all_gather(self._local_logits(hidden))  # [ranks, M, V / ranks]
        return parts.transpose(0, 1).reshape(hidden.shape[0], self.config.vocab_size).float()

    @torch.no_grad()
    def greedy(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M] int64: the lowest id among the highest logits, without gathering the logits."""
        return argmax_over_ranks(self._local_logits(hidden), self.shape.vocabulary.start, self.communicator)

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[M, H] -> the k best logits [M, k] float32 and their ids [M, k] int64; see ``top_k_over_ranks``."""
        return top_k_over_ranks(self._local_logits(hidden), self.shape.vocabulary.start, k, self.communicator)

    @torch.no_grad()
    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """See ``model.forward.ChoosesTokens``; the logits stay where they are."""
        logits = self._local_logits(hidden).float()
        return choose_over_ranks(logits, self.shape.vocabulary.start, self.communicator, draws)

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common, by name."""
        return {
            **asdict(self.config),
            "tensor_parallel": self.layout.tensor_parallel,
            "expert_parallel": self.layout.expert_parallel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "with_unembedding": self.unembedding is not None,
        }

    def _local_logits(self, hidden: Tensor) -> Tensor:
        if self.unembedding is None:
            raise RuntimeError("this model was loaded without its output projection; it cannot sample")
        return cast(Tensor, self.unembedding(hidden))
