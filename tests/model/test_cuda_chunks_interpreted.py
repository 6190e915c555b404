"""A padded chunk through the fast model, its Triton kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_roads import Road
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)
PAGE = 16


class Cache:
    """Pages of a few layers, poisoned."""

    def __init__(self, config: GptOssConfig) -> None:
        shape = (4, config.num_key_value_heads, 2, PAGE, config.head_dim)
        self.layers = [torch.full(shape, 50.0, dtype=torch.bfloat16) for _ in range(config.num_hidden_layers)]

    def layer(self, index: int) -> Tensor:
        return self.layers[index]


def batch(tokens: Tensor, padded: int) -> ForwardBatch:
    """The first tokens of a sequence in pages 2, 0, padded to so many."""
    count = len(tokens)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    ids, positions = torch.zeros(padded, dtype=torch.int64), torch.zeros(padded, dtype=torch.int64)
    slot = torch.full((padded,), -1)
    ids[:count], positions[:count] = tokens, torch.arange(count)
    slot[:count] = table[0, positions[:count] // PAGE] * PAGE + positions[:count] % PAGE
    starts = torch.tensor([0, count], dtype=torch.int32)
    pages = PagedSequences(table, starts, torch.tensor([count], dtype=torch.int32), slot)
    return ForwardBatch(ids, positions, pages, pages)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_padding_changes_nothing_that_anybody_reads(spread_config: GptOssConfig) -> None:
    config = replace(
        spread_config,
        num_hidden_layers=2,
        intermediate_size=128,
        num_experts=4,
        experts_per_token=2,
        sliding_window=16,
    )
    model = CudaTransformer(config, synthesize_parameters(config, seed=6), "cpu", road=Road.PORTABLE)
    tokens = torch.randint(0, config.vocab_size, (19,), generator=torch.Generator().manual_seed(2))
    outcomes: list[tuple[Tensor, Any]] = []
    for padded in (19, 24):
        cache = Cache(config)
        outcomes.append((model.forward(batch(tokens, padded), cache), cache))
    (exact, one), (hidden, other) = outcomes
    assert bool(hidden.isfinite().all())
    torch.testing.assert_close(hidden[:19], exact, rtol=0.02, atol=0.02)
    for a, b in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        assert bool((b[[1, 3]] == 50.0).all())
        assert bool((b[0, :, :, 3:] == 50.0).all())
        assert not bool((b[0, :, :, :3] == 50.0).any())
