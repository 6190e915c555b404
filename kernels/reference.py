"""Every op of the GPT-OSS stack in plain torch: the definition that fast twins are tested against.

Shape letters: T tokens of the step, B sequences, H hidden size, Q query heads, G kv heads, D head dim,
E experts, K experts per token, I expert intermediate size, P pages of a block table, S page size in tokens,
N pages of the cache, V vocabulary.

The maths follows OpenAI's reference implementation (gpt_oss/torch/model.py); arithmetic is float32 wherever
a sum or an exponential is taken, and results are cast to the dtype of the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.fp8_pages import Fp8Pages, KvLayer

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
MXFP4_BLOCK = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """Which pages hold which sequences' keys for one group of layers, in one step.

    Attributes:
        block_table: [B, P] int32, logical page -> physical page; entries that a layer cannot see (fallen out
            of the window, or beyond the length) may hold anything.
        query_start: [B + 1] int32, sequence b owns tokens ``query_start[b] : query_start[b + 1]``.
        kv_len: [B] int32, keys of sequence b including those written in this step. Its queries are the last
            ``query_start[b + 1] - query_start[b]`` of them. 0 marks a padding row, whose query sees nothing.
        slot: [T] int64, physical slot (page * S + offset) where each token's key and value go.
        decodes: so many sequences at the front are known, on the host, to have one query token each.
        chunk_start: [B + 1 - decodes] int32, ``query_start`` of those behind them, counted from the first of
            theirs; where there are sequences of both kinds.
    """

    block_table: Tensor
    query_start: Tensor
    kv_len: Tensor
    slot: Tensor
    decodes: int = 0
    chunk_start: Tensor | None = None

    def parts(self) -> tuple[PagedSequences, PagedSequences] | None:
        """Decoding sequences and those behind them, each as a step of its own; None unless there are both."""
        count = self.decodes
        if self.chunk_start is None or not 0 < count < self.kv_len.shape[0]:
            return None
        front = (
            self.block_table[:count],
            self.query_start[: count + 1],
            self.kv_len[:count],
            self.slot[:count],
        )
        behind = self.block_table[count:], self.chunk_start, self.kv_len[count:], self.slot[count:]
        return PagedSequences(*front), PagedSequences(*behind)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One projection of all experts in MXFP4, as the checkpoint stores it.

    Attributes:
        blocks: [E, rows, cols / 32, 16] uint8, two values a byte, the low nibble is the even element.
        scales: [E, rows, cols / 32] uint8, exponent with bias 127 (E8M0).
    """

    blocks: Tensor
    scales: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm. x [T, H], weight [H] -> [T, H] in x's dtype; computed in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then norm. x, residual [T, H] -> (normed [T, H], new residual [T, H])."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out] in x's dtype."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def yarn_inv_freq(
    head_dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
) -> tuple[Tensor, float]:
    """YaRN frequencies without truncation (arXiv 2309.00071; GPT-OSS sets ``truncate`` false).

    Returns:
        inv_freq [D / 2] float32, and the concentration that multiplies both cos and sin.
    """
    half = head_dim // 2
    freq = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if factor <= 1.0:
        return (1.0 / freq).float(), 1.0

    def boundary(rotations: float) -> float:
        return half * math.log(original_context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = boundary(beta_fast), boundary(beta_slow)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inv_freq = (1.0 / (factor * freq)) * ramp + (1.0 / freq) * (1.0 - ramp)
    return inv_freq.float(), 0.1 * math.log(factor) + 1.0


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, concentration: float) -> Tensor:
    """Rotary embedding, NeoX halves. x [T, heads, D], positions [T] -> rotated x in x's dtype."""
    angle = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    cos = (angle.cos() * concentration)[:, None, :]
    sin = (angle.sin() * concentration)[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(key: Tensor, value: Tensor, kv_layer: KvLayer, slot: Tensor) -> None:
    """Store keys and values in their pages, in place.

    Args:
        key, value: [T, G, D].
        kv_layer: [N, G, 2, S, D] view of one layer (index 0 keys, 1 values), any page stride; or FP8 pages.
        slot: [T] int64, page * S + offset; a negative slot is skipped (padding).
    """
    page_size = kv_layer.shape[3]
    keep = slot >= 0
    page, offset = slot[keep] // page_size, slot[keep] % page_size
    if isinstance(kv_layer, Fp8Pages):
        kv_layer.write(key[keep], value[keep], page, offset)
        return
    kv_layer[page, :, 0, offset] = key[keep].to(kv_layer.dtype)
    kv_layer[page, :, 1, offset] = value[keep].to(kv_layer.dtype)


def paged_attention(
    query: Tensor,
    kv_layer: KvLayer,
    sequences: PagedSequences,
    sinks: Tensor,
    window: int | None,
    sm_scale: float,
) -> Tensor:
    """Causal attention over paged keys with one sink logit per query head.

    The sink adds exp(sink) to the softmax denominator and nothing to the output; it is not multiplied by
    ``sm_scale``. ``window`` keys are visible to a query, itself included; None sees all.

    Args:
        query: [T, Q, D], rotated.
        kv_layer: [N, G, 2, S, D] view of one layer, or FP8 pages; query head h reads kv head h // (Q / G).
        sinks: [Q].

    Returns:
        [T, Q, D] in query's dtype.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, page_size = kv_layer.shape[1], kv_layer.shape[3]
    out = torch.empty_like(query)
    starts, lengths = sequences.query_start.tolist(), sequences.kv_len.tolist()
    for b, length in enumerate(lengths):
        begin, end = starts[b], starts[b + 1]
        count = end - begin
        if count == 0:
            continue
        if length == 0:  # a padding row
            out[begin:end] = 0
            continue
        first_query = length - count
        first_key = 0 if window is None else max(0, first_query - window + 1)
        first_page = first_key // page_size
        pages = sequences.block_table[b, first_page : -(-length // page_size)].long()
        offset = first_page * page_size
        kv = _gather(kv_layer, pages).flatten(2, 3)  # [2, G, pages * S, D]
        key, value = kv[:, :, first_key - offset : length - offset].float()
        # Queries that share a kv head are rows of one matrix: [G, Q / G * count, D].
        q = query[begin:end].float().reshape(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = q.reshape(kv_heads, -1, head_dim) @ key.mT
        scores = scores.view(kv_heads, -1, count, length - first_key) * sm_scale
        if count > 1:  # a single query sees every key from first_key on
            key_pos = torch.arange(first_key, length, device=query.device)
            query_pos = torch.arange(first_query, length, device=query.device)
            hidden = key_pos[None, :] > query_pos[:, None]
            if window is not None:
                hidden |= key_pos[None, :] <= query_pos[:, None] - window
            scores.masked_fill_(hidden, -math.inf)
        sink = sinks.float().reshape(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        mixed = (weights.reshape(kv_heads, -1, length - first_key) @ value).view(q.shape)
        out[begin:end] = mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(query.dtype)
    if starts[-1] < tokens:
        out[starts[-1] :] = 0  # padding of a fixed-size batch
    return out


def _gather(kv_layer: KvLayer, pages: Tensor) -> Tensor:
    """Pages [P] int64 of a layer -> [2, G, P, S, D]."""
    if isinstance(kv_layer, Fp8Pages):
        return kv_layer.widened(pages).permute(2, 1, 0, 3, 4)
    return kv_layer.permute(2, 1, 0, 3, 4).index_select(2, pages)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts: top-k of the logits, then softmax over those k only.

    Args:
        x: [T, H]; weight: [E, H]; bias: [E].

    Returns:
        expert_ids [T, K] int64, best first (the lowest id among equals), and expert_weights [T, K] in x's
        dtype (bf16 in the checkpoint's own arithmetic).
    """
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    values, expert_ids = logits.sort(dim=-1, descending=True, stable=True)
    values, expert_ids = values[:, :top_k], expert_ids[:, :top_k]
    return expert_ids, torch.softmax(values, dim=-1).to(x.dtype)


def swiglu(x: Tensor, alpha: float = SWIGLU_ALPHA, limit: float = SWIGLU_LIMIT) -> Tensor:
    """Clamped SwiGLU on interleaved columns (gate even, up odd). x [..., 2 I] -> [..., I].

    The gate is clamped from above only, the up half from both sides, and 1 is added to it.
    """
    gate, up = x[..., ::2].float(), x[..., 1::2].float()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


def dequantize_mxfp4(matrix: ExpertMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 -> [E, rows, cols]; exact in bfloat16 and float32."""
    pairs = torch.tensor(
        [(FP4_VALUES[byte & 0x0F], FP4_VALUES[byte >> 4]) for byte in range(256)],
        dtype=torch.float32,
        device=matrix.blocks.device,
    )
    values = torch.nn.functional.embedding(matrix.blocks.int(), pairs).flatten(-2)  # [E, rows, blocks, 32]
    exponent = (matrix.scales.to(torch.int32) - 127).unsqueeze(-1)
    return torch.ldexp(values, exponent).flatten(-2).to(dtype)


def quantize_mxfp4(weight: Tensor) -> ExpertMatrix:
    """[E, rows, cols] -> nearest MXFP4 (OCP Microscaling v1.0: block exponent from the largest magnitude)."""
    experts, rows, cols = weight.shape
    blocks = weight.float().reshape(experts, rows, cols // MXFP4_BLOCK, MXFP4_BLOCK)
    peak = blocks.abs().amax(-1)
    exponent = torch.floor(torch.log2(peak.clamp_min(2.0**-126))) - 2
    exponent = exponent.clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent.to(torch.int32).unsqueeze(-1))
    grid = torch.tensor(FP4_VALUES[:8], device=weight.device)
    edges = (grid[1:] + grid[:-1]) / 2
    code = torch.bucketize(scaled.abs().contiguous(), edges, right=False).to(torch.uint8)
    code = code | ((scaled < 0).to(torch.uint8) << 3)
    packed = code[..., ::2] | (code[..., 1::2] << 4)
    return ExpertMatrix(packed, (exponent + 127).to(torch.uint8))


def moe(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    limit: float = SWIGLU_LIMIT,
    first_expert: int = 0,
) -> Tensor:
    """Mixture of experts: sum_k w_k * (W2 swiglu(W1 x + b1) + b2).

    Args:
        x: [T, H].
        expert_ids, expert_weights: [T, K]; choices of experts that are not held here add nothing.
        gate_up: [E, 2 I, H] (rows interleaved: gate even, up odd); gate_up_bias: [E, 2 I].
        down: [E, H, I]; down_bias: [E, H].
        limit: clamp of SwiGLU.
        first_expert: id of the first expert held here, E of them in a row.

    Returns:
        [T, H] in x's dtype; summed in float32 in the order of expert ids, so the result is deterministic.
    """
    top_k = expert_ids.shape[1]
    # Rows of one expert side by side: one pass over the ids instead of one per expert.
    order = expert_ids.flatten().argsort(stable=True)
    held = gate_up.shape[0]
    counts = expert_ids.flatten().bincount(minlength=first_expert + held).tolist()
    token, weight = order // top_k, expert_weights.flatten()[order].float()[:, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    end = sum(counts[:first_expert])
    for expert, count in enumerate(counts[first_expert : first_expert + held]):
        if count == 0:
            continue
        begin, end = end, end + count
        rows = token[begin:end]
        hidden = swiglu(linear(x[rows], gate_up[expert], gate_up_bias[expert]), limit=limit)
        y = linear(hidden, down[expert], down_bias[expert])
        out.index_add_(0, rows, y.float() * weight[begin:end])
    return out.to(x.dtype)
