"""The trainable twin of the GPT-OSS model: same mathematics, experts computed densely, weights as they ship.

Every forward pass sees the weights as the checkpoint stores them, experts in MXFP4 and all else in bfloat16,
by straight-through estimation, so that nothing is lost when the model is packed. Shape letters are those of
``kernels/reference.py``; R is rows of packed conversations, T tokens per row, and V the kept vocabulary rows
plus the one that all other tokens share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from antiphon.kernels.reference import (
    FP4_VALUES,
    MXFP4_BLOCK,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    yarn_inv_freq,
)
from antiphon.model.config import GptOssConfig

FLEX_BLOCK = 128
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys each query may see, for the two kinds of layers.

    ``blocks`` are flex-attention block masks; ``masks`` are [R, 1, T, T] bool, true where visible.
    """

    full: object
    sliding: object


def mxfp4_rounded(weight: Tensor) -> Tensor:
    """What ``dequantize_mxfp4(quantize_mxfp4(weight))`` gives, on [..., cols], in few fused operations."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    peak = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = (peak.view(torch.int32) >> 23) - 2  # the biased exponent of the block's scale
    scale = (exponent << 23).view(torch.float32)
    magnitude = (blocks / scale).abs()
    rounded = torch.zeros_like(magnitude)
    for low, high in pairwise(FP4_VALUES[:8]):
        rounded = torch.where(magnitude > (low + high) / 2, high, rounded)
    signed: Tensor = torch.sign(blocks) * rounded * scale
    return signed.flatten(-2)


def shipped_experts(weight: Tensor) -> Tensor:
    """An expert parameter as stored, gradients straight through; a frozen one is taken as it is."""
    if not weight.requires_grad:
        return weight
    with torch.no_grad():
        rounded = mxfp4_rounded(weight)
    return weight + (rounded - weight).detach()


def shipped(weight: Tensor) -> Tensor:
    """Any other parameter as stored (bfloat16), gradients straight through; float32. Frozen ones as they are.

    Rounds to nearest even on the bits, since a compiler may drop a cast to bfloat16 and back.
    """
    if not weight.requires_grad:
        return weight
    with torch.no_grad():
        bits = weight.view(torch.int32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return weight + (rounded - weight).detach()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of a pass stand: rotations [R, 1, T, D / 2], visible keys, and how to compute."""

    cos: Tensor
    sin: Tensor
    seen: Visibility
    flex: bool
    dtype: torch.dtype


class Attention(nn.Module):
    """Grouped-query attention with sinks; even layers see a window of 128 keys."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.config, self.sliding = config, config.is_sliding(layer)
        h, d = config.hidden_size, config.head_dim
        q, g = config.num_attention_heads * d, config.num_key_value_heads * d
        self.norm = nn.Parameter(torch.ones(h))
        self.q_weight = nn.Parameter(torch.randn(q, h) * h**-0.5)
        self.k_weight = nn.Parameter(torch.randn(g, h) * h**-0.5)
        self.v_weight = nn.Parameter(torch.randn(g, h) * h**-0.5)
        self.o_weight = nn.Parameter(torch.randn(h, q) * (q**-0.5 / math.sqrt(2 * config.num_hidden_layers)))
        self.q_bias, self.k_bias = nn.Parameter(torch.zeros(q)), nn.Parameter(torch.zeros(g))
        self.v_bias, self.o_bias = nn.Parameter(torch.zeros(g)), nn.Parameter(torch.zeros(h))
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def project(self, x: Tensor, place: Placement) -> tuple[Tensor, Tensor, Tensor]:
        """[R, T, H] -> query [R, Q, T, D], key and value [R, G, T, D]; query and key rotated."""
        c = self.config
        shape = (*x.shape[:2], -1, c.head_dim)
        y = norm(x, shipped(self.norm), c.rms_norm_eps).to(place.dtype)
        query = _linear(y, self.q_weight, self.q_bias).view(shape).transpose(1, 2)
        key = _linear(y, self.k_weight, self.k_bias).view(shape).transpose(1, 2)
        value = _linear(y, self.v_weight, self.v_bias).view(shape).transpose(1, 2)
        return rotate(query, place.cos, place.sin), rotate(key, place.cos, place.sin), value

    def forward(self, x: Tensor, place: Placement) -> Tensor:
        """[R, T, H] float32 -> the same."""
        query, key, value = self.project(x, place)
        visible = place.seen.sliding if self.sliding else place.seen.full
        attend = flex_attend if place.flex else masked_attend
        mixed = attend(query, key, value, shipped(self.sinks), visible, self.config.head_dim**-0.5)
        return self.output(mixed)

    def output(self, mixed: Tensor) -> Tensor:
        """[R, Q, T, D] -> [R, T, H]."""
        return _linear(mixed.transpose(1, 2).flatten(2), self.o_weight, self.o_bias)


def masked_attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: object, scale: float) -> Tensor:
    """Plain attention with sinks: q [R, Q, T, D], k and v [R, G, S, D], visible [R, 1, T, S] -> like q."""
    assert isinstance(visible, Tensor)
    groups = k.shape[1]
    queries = q.reshape(q.shape[0], groups, -1, *q.shape[2:])  # [R, G, M, T, D]
    scores = (queries.flatten(2, 3) @ k.transpose(-1, -2)).float() * scale
    scores = scores.view(*queries.shape[:4], -1).masked_fill(~visible.unsqueeze(1), -math.inf)
    sink = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:4], 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    mixed: Tensor = weights.to(v.dtype).flatten(2, 3) @ v
    return mixed.view(q.shape)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: object, scale: float) -> Tensor:
    """The same with flex attention: the sink takes its share of the softmax through the log-sum-exp."""
    assert isinstance(visible, BlockMask)
    out, extra = flex_attention(
        q, k, v, block_mask=visible, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert extra.lse is not None
    share = torch.sigmoid(extra.lse.float() - sinks.float()[None, :, None])
    return (out * share.unsqueeze(-1)).to(v.dtype)


class Experts(nn.Module):
    """Top-4 mixture of clamped-SwiGLU experts, all of them computed and the unchosen weighted by zero."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        e, h, i = config.num_experts, config.hidden_size, config.intermediate_size
        self.norm = nn.Parameter(torch.ones(h))
        self.router_weight = nn.Parameter(torch.randn(e, h) * h**-0.5)
        self.router_bias = nn.Parameter(torch.zeros(e))
        self.gate_up = nn.Parameter(torch.randn(e, 2 * i, h) * h**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(e, 2 * i))
        self.down = nn.Parameter(torch.randn(e, h, i) * (i**-0.5 / math.sqrt(2 * config.num_hidden_layers)))
        self.down_bias = nn.Parameter(torch.zeros(e, h))

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[R, T, H] float32 -> (the same in ``dtype``, load-balance loss)."""
        c = self.config
        y = norm(x, shipped(self.norm), c.rms_norm_eps)
        logits = torch.nn.functional.linear(y, shipped(self.router_weight), shipped(self.router_bias))
        best, chosen = logits.topk(c.experts_per_token, dim=-1)
        weight = torch.zeros_like(logits).scatter(-1, chosen, torch.softmax(best, -1))  # [R, T, E]
        rows = shipped_experts(self.gate_up).view(c.num_experts, -1, 2, c.hidden_size)  # [E, I, gate | up, H]
        bias = shipped(self.gate_up_bias).view(c.num_experts, -1, 2)
        gate = self._product(y, rows[:, :, 0], bias[:, :, 0], dtype).clamp(max=SWIGLU_LIMIT)
        up = self._product(y, rows[:, :, 1], bias[:, :, 1], dtype).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        activated = gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1) * weight.unsqueeze(-1)
        down = shipped_experts(self.down).permute(1, 0, 2).flatten(1)  # [H, E I]
        out = torch.nn.functional.linear(activated.flatten(-2).to(dtype), down.to(dtype))
        out = out + (weight @ shipped(self.down_bias)).to(dtype)
        share = (weight > 0).float().mean((0, 1)) / c.experts_per_token
        balance = c.num_experts * (share * torch.softmax(logits, -1).mean((0, 1))).sum()
        return out, balance

    def _product(self, y: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """y [R, T, H], weight [E, I, H], bias [E, I] -> [R, T, E, I] float32, computed in ``dtype``."""
        flat, offset = weight.flatten(0, 1).to(dtype), bias.flatten().to(dtype)
        product = torch.nn.functional.linear(y.to(dtype), flat, offset)
        return product.float().view(*product.shape[:-1], self.config.num_experts, -1)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.attention, self.experts = Attention(config, layer), Experts(config)

    def forward(self, x: Tensor, place: Placement) -> tuple[Tensor, Tensor]:
        """[R, T, H] float32 -> (the same, load-balance loss)."""
        x = x + self.attention(x, place)
        mixed, balance = self.experts(x, place.dtype)
        return x + mixed, balance


class TinyGptOss(nn.Module):
    """The whole model over the kept rows; input and output rows are shared except the unseen token's."""

    def __init__(self, config: GptOssConfig, rows: int, unseen_tokens: int) -> None:
        super().__init__()
        self.config, self.unseen_tokens = config, unseen_tokens
        self.embedding = nn.Parameter(torch.randn(rows, config.hidden_size) * config.hidden_size**-0.5)
        self.unseen_input = nn.Parameter(torch.randn(1, config.hidden_size) * config.hidden_size**-0.5)
        self.unseen_output = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.full((config.hidden_size,), 1.0))

    def embed(self, rows: Tensor) -> Tensor:
        """rows [R, T] int64 -> [R, T, H] float32."""
        return torch.nn.functional.embedding(
            rows, torch.cat((shipped(self.embedding), shipped(self.unseen_input)))
        )

    def forward(self, rows: Tensor, place: Placement) -> tuple[Tensor, Tensor]:
        """rows [R, T] int64 -> (final-norm hidden states [R, T, H] of the place's dtype, balance loss)."""
        x = self.embed(rows)
        balance = torch.zeros((), device=rows.device)
        for block in self.blocks:
            x, extra = block(x, place)
            balance = balance + extra
        y = norm(x, shipped(self.norm), self.config.rms_norm_eps).to(place.dtype)
        return y, balance / len(self.blocks)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32; the last column stands for all unseen tokens together."""
        table = torch.cat((shipped(self.embedding), shipped(self.unseen_output)))
        scores = torch.nn.functional.linear(hidden, table.to(hidden.dtype)).float()
        offset = torch.zeros(scores.shape[-1], device=scores.device)
        offset[-1] = math.log(self.unseen_tokens)
        return scores + offset


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of float32."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotation(config: GptOssConfig, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D / 2] of positions 0 to T - 1, YaRN's concentration included."""
    inv_freq, concentration = yarn_inv_freq(
        config.head_dim,
        config.rope_theta,
        config.rope_scaling_factor,
        config.rope_original_context,
        config.rope_beta_fast,
        config.rope_beta_slow,
    )
    angle = torch.arange(tokens, device=device).float()[:, None] * inv_freq.to(device)[None]
    return angle.cos() * concentration, angle.sin() * concentration


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on [R, heads, T, D]; cos and sin [R, 1, T, D / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matrix product in x's dtype with the weights as shipped."""
    return torch.nn.functional.linear(x, shipped(weight).to(x.dtype), shipped(bias).to(x.dtype))


@dataclass(frozen=True, slots=True)
class Packing:
    """How conversations share rows: several follow one opening, which each of them sees as its own.

    Attributes:
        documents: [R, T] int, 0 for the shared opening, then 1, 2, ... for the conversations of the row.
        positions: [R, T] int, where a token stands in its conversation, the opening counted in.
    """

    documents: Tensor
    positions: Tensor

    @staticmethod
    def of_documents(documents: Tensor) -> Packing:
        """Rows of conversations that share nothing, numbered from 1; positions are those in the row."""
        places = torch.arange(documents.shape[1], device=documents.device)
        return Packing(documents, places.expand_as(documents))


def dense_visibility(packing: Packing, window: int) -> Visibility:
    """Masks: the same conversation or its opening, not later, within the window of sliding layers."""
    documents, positions = packing.documents, packing.positions
    place = torch.arange(documents.shape[1], device=documents.device)
    key = documents[:, None, :]
    same = (documents[:, :, None] == key) | (key == 0)
    causal = (same & (place[:, None] >= place[None, :])).unsqueeze(1)
    near = (positions[:, :, None] - positions[:, None, :] < window).unsqueeze(1)
    return Visibility(causal, causal & near)


def flex_visibility(packing: Packing, window: int) -> Visibility:
    """The same as block masks for flex attention; T is a multiple of the block size.

    Built from tensors alone, so that it can be part of a compiled step. Conversations are numbered in order
    within a row, so two blocks share one exactly when their ranges of numbers overlap.
    """
    documents, positions = packing.documents, packing.positions
    place = torch.arange(documents.shape[1] // FLEX_BLOCK, device=documents.device)
    first, last = documents[:, ::FLEX_BLOCK], documents[:, FLEX_BLOCK - 1 :: FLEX_BLOCK]
    distance = place[:, None] - place[None, :]
    opening = (first == 0)[:, None, :] & (distance >= 0)
    shared = (first[:, :, None] <= last[:, None, :]) & (distance >= 0)  # [R, query blocks, key blocks]

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        owner = documents[row, key]
        return ((documents[row, query] == owner) | (owner == 0)) & (query >= key)

    def sliding(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(row, head, query, key) & (positions[row, query] - positions[row, key] < window)

    reach = -(-(window - 1) // FLEX_BLOCK)
    full = shared | opening
    return Visibility(_block_mask(full, causal), _block_mask(shared & (distance <= reach) | opening, sliding))


def _block_mask(visible: Tensor, rule: MaskRule) -> BlockMask:
    """visible [R, query blocks, key blocks] bool -> a block mask, each block partly masked by ``rule``."""
    count = visible.sum(-1, dtype=torch.int32).unsqueeze(1)
    order = visible.int().argsort(dim=-1, descending=True, stable=True).int().unsqueeze(1).contiguous()
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=FLEX_BLOCK, mask_mod=rule)


def placement(config: GptOssConfig, packing: Packing, flex: bool, dtype: torch.dtype) -> Placement:
    """Rotations and masks for packed rows."""
    cos, sin = rotation(config, packing.positions.shape[1], packing.positions.device)
    visibility = (flex_visibility if flex else dense_visibility)(packing, config.sliding_window)
    places = packing.positions.long()
    return Placement(cos[places].unsqueeze(1), sin[places].unsqueeze(1), visibility, flex, dtype)
