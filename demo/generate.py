"""Greedy generation with the trainable model: many prompts at once, key-value cache, plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.demo.harmony import CALL, RETURN
from antiphon.demo.network import (
    Attention,
    Block,
    Placement,
    TinyGptOss,
    Visibility,
    masked_attend,
    norm,
    rotation,
    shipped,
)
from antiphon.demo.vocabulary import Vocabulary

STOPS = (RETURN, CALL, 199_999)


class _Cache:
    """Keys and values [R, G, S, D] of every layer, each row filled up to its own length."""

    def __init__(self, model: TinyGptOss, rows: int, capacity: int, dtype: torch.dtype) -> None:
        c, device = model.config, model.embedding.device
        shape = (c.num_hidden_layers, 2, rows, c.num_key_value_heads, capacity, c.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        self.cos, self.sin = rotation(c, capacity, device)


@torch.no_grad()
def generate(
    model: TinyGptOss,
    vocabulary: Vocabulary,
    prompts: list[list[int]],
    max_tokens: int = 320,
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
) -> list[list[int]]:
    """Greedy continuations of token-id prompts, stop token included; unseen tokens are never chosen."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        outputs = _generate_batch(model, vocabulary, [prompts[i] for i in chosen], max_tokens, dtype)
        for index, output in zip(chosen, outputs, strict=True):
            results[index] = output
    return results


def _generate_batch(
    model: TinyGptOss, vocabulary: Vocabulary, prompts: list[list[int]], max_tokens: int, dtype: torch.dtype
) -> list[list[int]]:
    device = model.embedding.device
    row_of = torch.tensor(vocabulary.row_table(), device=device)
    token_of = torch.tensor(vocabulary.token_ids, device=device)
    stops = torch.isin(token_of, torch.tensor(STOPS, device=device))
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = max(map(len, prompts))
    padded = torch.full((len(prompts), longest), 199_999, device=device)
    for i, prompt in enumerate(prompts):
        padded[i, : len(prompt)] = torch.tensor(prompt, device=device)
    cache = _Cache(model, len(prompts), longest + max_tokens, dtype)
    start = torch.zeros_like(lengths)
    hidden = _forward(model, row_of[padded], start, cache, dtype)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    produced: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_tokens):
        best = model.logits(last)[:, :-1].argmax(-1)
        produced.append(best)
        done |= stops[best]
        if step % 16 == 15 and bool(done.all()):
            break
        last = _forward(model, best[:, None], lengths + step, cache, dtype)[:, 0]
    rows = torch.stack(produced, 1)
    return [_until_stop(token_of[row].tolist()) for row in rows]


def _until_stop(token_ids: list[int]) -> list[int]:
    end = next((i for i, token in enumerate(token_ids) if token in STOPS), len(token_ids))
    return token_ids[: end + 1]


def _forward(model: TinyGptOss, rows: Tensor, start: Tensor, cache: _Cache, dtype: torch.dtype) -> Tensor:
    """New tokens [R, T] at positions start + 0 .. T - 1 of each row -> final-norm hidden states [R, T, H]."""
    position = start[:, None] + torch.arange(rows.shape[1], device=rows.device)
    x = model.embed(rows)
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = x + _attend(block.attention, x, position, cache, index, dtype)
        x = x + block.experts(x, dtype)[0]
    return norm(x, shipped(model.norm), model.config.rms_norm_eps).to(dtype)


def _attend(
    attention: Attention, x: Tensor, position: Tensor, cache: _Cache, index: int, dtype: torch.dtype
) -> Tensor:
    cos, sin = cache.cos[position].unsqueeze(1), cache.sin[position].unsqueeze(1)
    place = Placement(cos, sin, Visibility(None, None), False, dtype)
    query, key, value = attention.project(x, place)
    keys, values = cache.layers[index]
    where = position[:, None, :, None].expand_as(key)
    keys.scatter_(2, where, key)
    values.scatter_(2, where, value)
    seen = int(position.max()) + 1
    distance = position[:, None, :, None] - torch.arange(seen, device=x.device)
    visible = distance >= 0
    if attention.sliding:
        visible = visible & (distance < attention.config.sliding_window)
    scale = attention.config.head_dim**-0.5
    mixed = masked_attend(
        query, keys[:, :, :seen], values[:, :, :seen], shipped(attention.sinks), visible, scale
    )
    return attention.output(mixed)
