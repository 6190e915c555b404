"""A model whose output depends on every key it should see.

It writes (token, position, layer) as the key of each position and reads the keys that a query sees back from
the pages, so a wrong page, a stale page, a wrong slot or a wrong window changes its output. What it should
say is also computed without pages, from the token ids alone: ``FakeModel.expected``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from antiphon.engine.requests import EngineRequest
from antiphon.engine.sampler import SamplingRow, sample
from antiphon.kernels.reference import PagedSequences, write_kv
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch, KvLayers

VOCABULARY = 61

WINDOW = 24

PAGE = 16

_MODULUS = 8191


def fake_config(layers: int = 4) -> GptOssConfig:
    """A tiny shape: one kv head of 4 numbers."""
    return GptOssConfig(
        num_hidden_layers=layers,
        num_experts=4,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=WINDOW,
        max_context_tokens=4096,
    )


def _mark(tokens: Any, positions: Any, layer: Any) -> Any:
    """What one key contributes to a query that sees it; of integers, or of int64 tensors."""
    return (tokens * 37 + positions * 101 + layer * 13 + 5) ** 2 % _MODULUS * (positions % 7 + 1)


class FakeModel:
    """See the module's docstring."""

    def __init__(self, config: GptOssConfig | None = None) -> None:
        self.config = config or fake_config()
        self.tokens_computed = 0
        self.batches: list[int] = []
        self.interrupt: Callable[[], None] | None = None
        """Called once in the middle of the next forward pass, as another thread might act then."""

    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write marks, read them back, and return each token's hash as its hidden state."""
        self.tokens_computed += len(batch.token_ids)
        self.batches.append(len(batch.full.kv_len))
        hashes = torch.zeros(len(batch.token_ids), dtype=torch.int64)
        for layer in range(self.config.num_hidden_layers):
            sliding = self.config.is_sliding(layer)
            group = batch.sliding if sliding else batch.full
            pages = kv.layer(layer)
            token, position = batch.token_ids.float(), batch.positions.float()
            key = torch.stack((token, position, torch.full_like(token, layer), token * 0), dim=-1)[:, None, :]
            write_kv(key, -key, pages, group.slot)
            self._read(hashes, group, pages, layer, WINDOW if sliding else None)
            if after_layer is not None:
                after_layer(layer)
            if self.interrupt is not None:
                interrupt, self.interrupt = self.interrupt, None
                interrupt()
        return (hashes % _MODULUS).to(torch.float32)[:, None]

    @staticmethod
    def _read(hashes: Tensor, group: PagedSequences, pages: Tensor, layer: int, window: int | None) -> None:
        starts, lengths = group.query_start.tolist(), group.kv_len.tolist()
        for row, length in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            first_query = length - (end - begin)
            first = 0 if window is None else max(0, first_query - window + 1)
            place = torch.arange(first, length)
            written = pages[group.block_table[row, place // PAGE].long(), 0, :, place % PAGE]
            keys, values = written[:, 0], written[:, 1]
            assert torch.equal(values, -keys), "a page holds half of a write"
            marks = _mark(keys[:, 0].long(), keys[:, 1].long(), keys[:, 2].long() + layer)
            if end - begin == 1:  # which sees all of them
                hashes[begin] += marks.sum()
                continue
            query = torch.arange(first_query, length)
            seen = place[None, :] <= query[:, None]
            if window is not None:
                seen &= place[None, :] > query[:, None] - window
            hashes[begin:end] += (seen * marks[None, :]).sum(dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, 1] -> [M, V], a fixed scatter of the hash."""
        base = hidden.long()
        ids = torch.arange(self.config.vocab_size)[None, :]
        return ((base * 523 + ids * 1237 + base // 3) % 997).float() / 100.0

    def expected(self, request: EngineRequest, max_sequence_tokens: int = 4096) -> list[int]:
        """All output tokens that the request must end with, computed without any page."""
        assert request.sampling is not None
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        output = list(request.output_token_ids)
        layers = range(self.config.num_hidden_layers)
        marks = [[_mark(token, place, 2 * layer) for place, token in enumerate(tokens)] for layer in layers]
        while len(output) < request.sampling.max_tokens and len(tokens) < max_sequence_tokens:
            seen = (marks[i][-WINDOW:] if self.config.is_sliding(i) else marks[i] for i in layers)
            total = sum(map(sum, seen))
            hidden = torch.tensor([[float(total % _MODULUS)]])
            token = sample(self.logits(hidden), [SamplingRow(request.sampling, output)])[0].token_id
            assert token is not None
            for layer in layers:
                marks[layer].append(_mark(token, len(tokens), 2 * layer))
            tokens.append(token)
            output.append(token)
            if token in request.sampling.stop_token_ids and not request.sampling.ignore_eos:
                break
        return output
