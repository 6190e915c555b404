"""The model as an engine drives it: any chunks, several sequences in a step, pages that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch
from antiphon.model.transformer import Transformer

Forward = Callable[..., Tensor]
PAGE = 16
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def mini_model(mini_config: GptOssConfig) -> Transformer:
    model = Transformer(mini_config, torch.float32)
    fill(model, synthesize_parameters(mini_config, seed=0))
    return model


def prompt(model: Transformer, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 64, 127, 128, 129, 199])
def test_chunked_equals_whole(chunk: int, tiny_model: Transformer, forward: Forward) -> None:
    token_ids = prompt(tiny_model, 200, seed=1)
    whole = forward(tiny_model, token_ids)
    torch.testing.assert_close(forward(tiny_model, token_ids, chunk=chunk), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page", [1, 16, 64, 500])
def test_page_size_does_not_matter(page: int, mini_model: Transformer, forward: Forward) -> None:
    token_ids = prompt(mini_model, 150, seed=1)
    whole = forward(mini_model, token_ids, page=200)
    torch.testing.assert_close(forward(mini_model, token_ids, page=page), whole, atol=TOLERANCE, rtol=0)


class TwoGroups:
    """KV of several sequences; full and sliding layers have separate pages, dealt from separate pools."""

    def __init__(self, config: GptOssConfig, pages: int) -> None:
        shape = (pages, config.num_key_value_heads, 2, PAGE, config.head_dim)
        self._layers = [torch.full(shape, 1e4) for _ in range(config.num_hidden_layers)]  # stale values

    def layer(self, index: int) -> Tensor:
        return self._layers[index]


def group(tables: list[list[int]], counts: list[int], lengths: list[int]) -> PagedSequences:
    """Pages of one group; page -1 stands for one that was given back."""
    slots = []
    for table, count, length in zip(tables, counts, lengths, strict=True):
        positions = torch.arange(length - count, length)
        slots.append(torch.tensor(table)[positions // PAGE] * PAGE + positions % PAGE)
    return PagedSequences(
        block_table=torch.tensor(tables, dtype=torch.int32),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        slot=torch.cat(slots),
    )


def test_prefill_and_decode_share_a_step_and_sliding_pages_are_given_back(
    mini_model: Transformer, forward: Forward
) -> None:
    """One sequence decodes at position 180 with its early sliding pages gone, another one begins."""
    long, short = prompt(mini_model, 181, seed=2), prompt(mini_model, 40, seed=3)
    kv: Any = TwoGroups(mini_model.config, pages=32)
    full = [list(range(12)), [20, 21, 22, *[0] * 9]]
    sliding = [list(range(31, 19, -1)), [2, 0, 1, *[0] * 9]]  # the short one takes pages of the long one

    positions = torch.arange(180)
    before = ForwardBatch(
        long[:180], positions, group(full[:1], [180], [180]), group(sliding[:1], [180], [180])
    )
    mini_model.forward(before, kv)

    # Query 180 sees keys from 53 on: pages 0 to 2 of the sliding group are out of its window.
    gone = 3
    sliding[1][:gone] = sliding[0][:gone]
    sliding[0][:gone] = [-1] * gone
    step = ForwardBatch(
        torch.cat((long[180:], short)),
        torch.cat((torch.tensor([180]), torch.arange(40))),
        group(full, [1, 40], [181, 40]),
        group(sliding, [1, 40], [181, 40]),
    )
    hidden = mini_model.forward(step, kv)
    torch.testing.assert_close(hidden[0], forward(mini_model, long)[-1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(hidden[1:], forward(mini_model, short), atol=TOLERANCE, rtol=0)


def test_padding_tokens_change_nothing(mini_model: Transformer, one_sequence: Any) -> None:
    """A fixed-size batch is filled up with tokens of no sequence, whose slot is -1."""
    token_ids = prompt(mini_model, 20, seed=4)
    kv, padded_kv = (one_sequence(mini_model, 20, PAGE) for _ in range(2))
    batch = kv.batch(token_ids, 0)
    pad = torch.zeros(5, dtype=torch.int64)
    pages = PagedSequences(
        batch.full.block_table,
        batch.full.query_start,
        batch.full.kv_len,
        torch.cat((batch.full.slot, pad - 1)),
    )
    padded = ForwardBatch(torch.cat((token_ids, pad)), torch.cat((batch.positions, pad)), pages, pages)
    expected = mini_model.forward(batch, kv)
    torch.testing.assert_close(mini_model.forward(padded, padded_kv)[:20], expected, atol=TOLERANCE, rtol=0)
    for layer in range(mini_model.config.num_hidden_layers):
        torch.testing.assert_close(padded_kv.layer(layer), kv.layer(layer), atol=TOLERANCE, rtol=0)


def test_other_dtypes_are_refused(mini_config: GptOssConfig) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        Transformer(mini_config, torch.float16)


def test_without_unembedding_nothing_of_it_is_allocated(mini_config: GptOssConfig) -> None:
    names = dict(Transformer(mini_config, torch.float32, with_unembedding=False).named_parameters())
    whole = dict(Transformer(mini_config, torch.float32).named_parameters())
    assert set(whole) - set(names) == {"unembedding.weight"}
