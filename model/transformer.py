"""GPT-OSS in plain torch over paged KV; names and order follow OpenAI's gpt_oss/torch/model.py.

Parameter names are those of OpenAI's checkpoints (``block.3.attn.qkv.weight``). Expert matrices are held in
the compute dtype; norm scales and sinks are held in float32, where the arithmetic on them happens.
Shape letters as in kernels/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from antiphon.kernels import reference as ops
from antiphon.kernels.fp8_pages import KvLayer
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch, KvLayers
from antiphon.model.parallel.layout import RankShape


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a float32 scale [H]."""

    def __init__(self, features: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.scale = _parameter(features, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] in x's dtype."""
        return ops.rms_norm(x, self.scale, self.eps)


class Linear(nn.Module):
    """A projection whose weights are left unset until a checkpoint fills them."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = _parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = _parameter(outputs, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        return ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token embedding [V, H]."""

    def __init__(self, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _parameter(rows, features, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        return nn.functional.embedding(token_ids, self.weight)


class AttentionBlock(nn.Module):
    """Norm, attention with sinks over this layer's pages, output projection, residual.

    ``shape`` says which heads are here; Q and G below count those.
    """

    def __init__(
        self, config: GptOssConfig, layer: int, dtype: torch.dtype, device: torch.device, shape: RankShape
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = len(shape.heads), len(shape.kv_heads), config.head_dim
        self.head_dim = head_dim
        self.num_attention_heads = heads
        self.num_key_value_heads = kv_heads
        self.window = config.sliding_window if config.is_sliding(layer) else None
        self.sm_scale = config.head_dim**-0.5
        self.sinks = _parameter(heads, dtype=torch.float32, device=device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.qkv = Linear(config.hidden_size, (heads + 2 * kv_heads) * head_dim, dtype, device)
        self.out = Linear(heads * head_dim, config.hidden_size, dtype, device)

    def forward(
        self, x: Tensor, positions: Tensor, yarn: Yarn, kv_layer: KvLayer, sequences: PagedSequences
    ) -> Tensor:
        """[T, H] -> [T, H]; arguments as in ``delta``."""
        return x + self.delta(x, positions, yarn, kv_layer, sequences)

    def delta(
        self, x: Tensor, positions: Tensor, yarn: Yarn, kv_layer: KvLayer, sequences: PagedSequences
    ) -> Tensor:
        """Writes the tokens' keys and values, attends, and returns what these heads add to x, [T, H].

        Args:
            x: [T, H].
            positions: [T] int64.
            yarn: the model's rotary frequencies.
            kv_layer: [N, G, 2, S, D], or FP8 pages.
            sequences: pages of this layer's group.
        """
        tokens = x.shape[0]
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        qkv = self.qkv(self.norm(x)).view(tokens, heads + 2 * kv_heads, self.head_dim)
        # One rotation for queries and keys: they lie side by side in the fused projection.
        rotated = ops.rope(qkv[:, : heads + kv_heads], positions, yarn.inv_freq, yarn.concentration)
        query, key, value = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
        ops.write_kv(key, value, kv_layer, sequences.slot)
        mixed = ops.paged_attention(query, kv_layer, sequences, self.sinks, self.window, self.sm_scale)
        return cast(Tensor, self.out(mixed.reshape(tokens, heads * self.head_dim)))


class MLPBlock(nn.Module):
    """Norm, router, experts, residual. Rows of mlp1 are interleaved: gate even, up odd.

    ``shape`` says which experts, and how much of each, are here; the router always knows all of them.
    """

    def __init__(
        self, config: GptOssConfig, dtype: torch.dtype, device: torch.device, shape: RankShape
    ) -> None:
        super().__init__()
        experts, hidden, inter = len(shape.experts), config.hidden_size, shape.inner_padded
        self.first_expert = shape.experts.start
        self.experts_per_token = config.experts_per_token
        self.swiglu_limit = config.swiglu_limit
        self.norm = RMSNorm(hidden, config.rms_norm_eps, device)
        self.gate = Linear(hidden, config.num_experts, dtype, device)
        self.mlp1_weight = _parameter(experts, 2 * inter, hidden, dtype=dtype, device=device)
        self.mlp1_bias = _parameter(experts, 2 * inter, dtype=dtype, device=device)
        self.mlp2_weight = _parameter(experts, hidden, inter, dtype=dtype, device=device)
        self.mlp2_bias = _parameter(experts, hidden, dtype=dtype, device=device)

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Normed [T, H] -> expert ids [T, K] int64, expert weights [T, K]."""
        bias = self.gate.bias
        if bias is None:
            raise RuntimeError("the router has a bias in every GPT-OSS model")
        return ops.route(normed, self.gate.weight, bias, self.experts_per_token)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return x + self.delta(x)

    def delta(self, x: Tensor) -> Tensor:
        """What the experts held here add to x, [T, H] -> [T, H]."""
        normed = self.norm(x)
        expert_ids, expert_weights = self.route(normed)
        return ops.moe(
            normed,
            expert_ids,
            expert_weights,
            self.mlp1_weight,
            self.mlp1_bias,
            self.mlp2_weight,
            self.mlp2_bias,
            self.swiglu_limit,
            self.first_expert,
        )


class TransformerBlock(nn.Module):
    """One layer: attention, then experts."""

    def __init__(
        self, config: GptOssConfig, layer: int, dtype: torch.dtype, device: torch.device, shape: RankShape
    ) -> None:
        super().__init__()
        self.attn = AttentionBlock(config, layer, dtype, device, shape)
        self.mlp = MLPBlock(config, dtype, device, shape)

    def forward(
        self, x: Tensor, positions: Tensor, yarn: Yarn, kv_layer: KvLayer, sequences: PagedSequences
    ) -> Tensor:
        """[T, H] -> [T, H]; arguments as in AttentionBlock."""
        return cast(Tensor, self.mlp(self.attn(x, positions, yarn, kv_layer, sequences)))


class Yarn(nn.Module):
    """The rotary frequencies that all layers share; computed, not part of a checkpoint."""

    inv_freq: Tensor

    def __init__(self, config: GptOssConfig, device: torch.device) -> None:
        super().__init__()
        inv_freq, self.concentration = ops.yarn_inv_freq(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling_factor,
            config.rope_original_context,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)


class Transformer(nn.Module):
    """A whole GPT-OSS model on one device; implements ``model.forward.LanguageModel``.

    Args:
        config: the shape.
        dtype: float32 or bfloat16, of weights, activations and keys and values.
        device: where every tensor lives.
        with_unembedding: False leaves the output projection out (prefill workers never sample).

    Weights are uninitialised memory until ``model.checkpoint.load.fill`` has run.
    """

    def __init__(
        self,
        config: GptOssConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        with_unembedding: bool = True,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
        device = torch.device(device)
        self.config = config
        self.dtype = dtype
        self.yarn = Yarn(config, device)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        shape = RankShape.whole(config)
        self.block = nn.ModuleList(
            TransformerBlock(config, layer, dtype, device, shape) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.unembedding = (
            Linear(config.hidden_size, config.vocab_size, dtype, device, bias=False)
            if with_unembedding
            else None
        )

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write the batch's KV, return final-norm hidden states [T, H]; ``after_layer(i)`` runs after it."""
        x = self.embedding(batch.token_ids)
        for layer, block in enumerate(self.block):
            sequences = batch.sliding if self.config.is_sliding(layer) else batch.full
            x = block(x, batch.positions, self.yarn, kv.layer(layer), sequences)
            if after_layer is not None:
                after_layer(layer)
        return cast(Tensor, self.norm(x))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32.

        Raises:
            RuntimeError: the model was built without its output projection.
        """
        if self.unembedding is None:
            raise RuntimeError("this model was loaded without its output projection; it cannot sample")
        return cast(Tensor, self.unembedding(hidden)).float()
