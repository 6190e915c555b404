"""The model against an independent implementation, transformers' GptOssForCausalLM, on the same files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.checkpoint.load import load_model
from antiphon.model.transformer import Transformer

TOLERANCE = 2e-4
"""On logits with a standard deviation of 3; a wrong window or dropped sinks are off by 100 times that."""
LENGTHS = (1, 127, 128, 129, 130, 300, 1000)

Forward = Callable[..., Tensor]


@pytest.fixture(scope="module")
def oracle(tiny_directory: Path) -> Any:
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        tiny_directory,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    )
    return model.eval()


def prompt(length: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def sampled_positions(length: int) -> list[int]:
    """Positions whose logits are compared: both sides of the window's edge, and the end."""
    edges = [0, 1, 126, 127, 128, 129, 130, 255, 256, 257]
    return sorted({p for p in (*edges, *range(length - 16, length)) if 0 <= p < length})


@torch.no_grad()
def oracle_hidden(oracle: Any, token_ids: Tensor) -> Tensor:
    hidden: Tensor = oracle.model(token_ids[None]).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("chunk", [None, 48], ids=["whole", "chunked"])
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(
    length: int, chunk: int | None, oracle: Any, tiny_model: Transformer, forward: Forward
) -> None:
    token_ids = prompt(length, tiny_model.config.vocab_size, seed=length)
    expected_hidden = oracle_hidden(oracle, token_ids)
    hidden = forward(tiny_model, token_ids, chunk=chunk)
    torch.testing.assert_close(hidden, expected_hidden, atol=TOLERANCE, rtol=0)
    positions = sampled_positions(length)
    with torch.no_grad():
        expected = oracle.lm_head(expected_hidden[positions])
    torch.testing.assert_close(tiny_model.logits(hidden[positions]), expected, atol=TOLERANCE, rtol=0)


def test_greedy_continuation_across_the_window_equals_transformers(
    oracle: Any, tiny_model: Transformer, one_sequence: Any
) -> None:
    start, stop = 118, 140
    token_ids = prompt(start, tiny_model.config.vocab_size, seed=7)
    kv = one_sequence(tiny_model, stop, page_size=16)
    hidden = tiny_model.forward(kv.batch(token_ids, 0), kv)
    ours: list[int] = []
    for position in range(start, stop):
        ours.append(int(tiny_model.logits(hidden[-1:]).argmax()))
        hidden = tiny_model.forward(kv.batch(torch.tensor(ours[-1:]), position), kv)

    theirs: list[int] = []
    for _ in range(start, stop):
        sequence = torch.cat((token_ids, torch.tensor(theirs, dtype=torch.int64)))
        with torch.no_grad():
            theirs.append(int(oracle.lm_head(oracle_hidden(oracle, sequence)[-1:]).argmax()))
    assert ours == theirs


def largest_difference(hidden: Tensor, expected: Tensor) -> float:
    return (hidden - expected).abs().max().item()


@pytest.mark.parametrize("window", [127, 129])
def test_a_window_off_by_one_would_be_seen(
    window: int, oracle: Any, tiny_directory: Path, forward: Forward
) -> None:
    model = load_model(tiny_directory, torch.float32, with_unembedding=False)
    for block in model.block:
        if block.attn.window is not None:
            block.attn.window = window
    token_ids = prompt(140, model.config.vocab_size)
    expected = oracle_hidden(oracle, token_ids)
    hidden = forward(model, token_ids)
    inside = min(window, 128)
    assert largest_difference(hidden[:inside], expected[:inside]) < TOLERANCE
    assert largest_difference(hidden, expected) > 100 * TOLERANCE


def test_dropped_sinks_would_be_seen(oracle: Any, tiny_directory: Path, forward: Forward) -> None:
    model = load_model(tiny_directory, torch.float32, with_unembedding=False)
    for block in model.block:
        block.attn.sinks.fill_(-torch.inf)
    token_ids = prompt(140, model.config.vocab_size)
    assert largest_difference(forward(model, token_ids), oracle_hidden(oracle, token_ids)) > 100 * TOLERANCE


def test_each_sink_changes_the_logits(tiny_directory: Path, forward: Forward) -> None:
    model = load_model(tiny_directory, torch.float32, with_unembedding=False)
    token_ids = prompt(20, model.config.vocab_size)
    before = forward(model, token_ids)
    for block in model.block:
        for head in range(model.config.num_attention_heads):
            original = block.attn.sinks[head].item()
            block.attn.sinks[head] = original + 1.0
            assert largest_difference(forward(model, token_ids), before) > TOLERANCE
            block.attn.sinks[head] = original
    assert torch.equal(forward(model, token_ids), before)


def test_yarn_constants_would_be_seen(oracle: Any, tiny_model: Transformer, forward: Forward) -> None:
    from antiphon.model.transformer import Yarn

    token_ids = prompt(300, tiny_model.config.vocab_size)
    expected = oracle_hidden(oracle, token_ids)
    right = tiny_model.yarn
    try:
        for change in ({"rope_scaling_factor": 1.0}, {"rope_beta_fast": 31.0}, {"rope_theta": 149_000.0}):
            tiny_model.yarn = Yarn(replace(tiny_model.config, **change), torch.device("cpu"))  # type: ignore[arg-type]
            assert largest_difference(forward(tiny_model, token_ids), expected) > 20 * TOLERANCE, change
    finally:
        tiny_model.yarn = right


def test_bfloat16_is_near_float32(tiny_directory: Path, tiny_model: Transformer, forward: Forward) -> None:
    narrow = load_model(tiny_directory, torch.bfloat16)
    token_ids = prompt(150, tiny_model.config.vocab_size)
    wide_logits = tiny_model.logits(forward(tiny_model, token_ids))
    narrow_logits = narrow.logits(forward(narrow, token_ids))
    assert narrow_logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(wide_logits, narrow_logits, dim=-1)
    assert similarity.median() > 0.999
    assert similarity.min() > 0.8  # a router's near tie may choose another expert for one token


def test_a_model_without_its_projection_says_so(tiny_directory: Path, forward: Forward) -> None:
    model = load_model(tiny_directory, torch.float32, with_unembedding=False)
    hidden = forward(model, prompt(3, model.config.vocab_size))
    with pytest.raises(RuntimeError, match="without its output projection"):
        model.logits(hidden)


def test_after_layer_follows_each_layers_kv(tiny_model: Transformer, one_sequence: Any) -> None:
    token_ids = prompt(5, tiny_model.config.vocab_size)
    kv = one_sequence(tiny_model, len(token_ids), page_size=16)
    seen: list[tuple[int, list[bool]]] = []
    layers = range(tiny_model.config.num_hidden_layers)
    tiny_model.forward(
        kv.batch(token_ids, 0),
        kv,
        lambda layer: seen.append((layer, [bool(kv.layer(i).any()) for i in layers])),
    )
    assert seen == [(layer, [i <= layer for i in layers]) for layer in layers]
