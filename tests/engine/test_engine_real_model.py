"""The engine on the real architecture, small: how a text is scheduled changes none of its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.events import SequencePreempted
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import PageTable, Sequence
from antiphon.engine.settings import EngineSettings
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.transformer import Transformer

WINDOW, PAGE, LIMIT = 32, 16, 256


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = GptOssConfig(
        num_hidden_layers=4,
        num_experts=4,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        experts_per_token=2,
        sliding_window=WINDOW,
        max_context_tokens=LIMIT,
        eos_token_ids=(1,),
        pad_token_id=0,
    )
    model = Transformer(config, torch.float32)
    fill(model, synthesize_parameters(config, seed=3, device="cpu"))
    return model


def _settings(**changes: Any) -> EngineSettings:
    base = {
        "page_size_tokens": PAGE,
        "full_pages": 80,
        "sliding_pages": 60,
        "window_tokens": WINDOW,
        "max_context_tokens": LIMIT,
        "vocab_size": 512,
        "chunk_tokens": 48,
        "headroom_tokens": PAGE,
        "layer_groups": 2,
    }
    return EngineSettings(**{**base, **changes})


def _whole_context(model: Transformer, request: EngineRequest, full_fp8: bool = False) -> list[int]:
    """Greedy text with every step computed from nothing, in pages laid out in order."""
    tokens = list(request.prompt_token_ids)
    pages = LIMIT // PAGE
    assert request.sampling is not None
    for _ in range(request.sampling.max_tokens):
        cache = PagedKvCache(
            *(model.config,),
            full_pages=pages,
            sliding_pages=pages,
            page_size=PAGE,
            dtype=torch.float32,
            full_fp8=full_fp8,
        )
        sequence = Sequence(
            EngineRequest("oracle", 1, RequestKind.COLOCATED, tuple(tokens), sampling=request.sampling),
            0,
            0.0,
        )
        sequence.pages = PageTable(full=list(range(pages)), sliding=list(range(pages)))
        batch = build_forward_batch([Work(sequence, 0, len(tokens), samples=True)], PAGE, torch.device("cpu"))
        tokens.append(int(model.logits(model.forward(batch, cache)[-1:]).argmax()))
    return tokens[len(request.prompt_token_ids) :]


def _prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((i * 37 + i * i * 11 + salt * 101 + 3) % 512 for i in range(length))


@pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 100, 200])
def test_chunked_prefill_and_decode_equal_whole_context(kit: Any, model: Transformer, length: int) -> None:
    request = kit.request("a", _prompt(length), max_tokens=10)
    loop = EngineLoop(model, _settings())
    loop.submit(request)
    said = kit.run(loop)
    assert said.tokens["a"] == _whole_context(model, request)
    assert len(set(said.tokens["a"])) > 1, "a text of one token repeated would prove little"


@pytest.mark.parametrize("mode", ["plain", "overlapped late", "graphs late"])
def test_batches_prefixes_and_preemption_equal_whole_context(kit: Any, model: Transformer, mode: str) -> None:
    requests = [
        kit.request(f"r{i}", (*_prompt(40), *_prompt(1 + 9 * i, salt=i)), max_tokens=25) for i in range(6)
    ]
    loop = kit.engine(mode, model, _settings(full_pages=13, sliding_pages=14))
    for request in requests:
        loop.submit(request)
    said = kit.run(loop)
    assert said.of_type(SequencePreempted)
    assert loop.snapshot().prefix_hit_tokens > 0
    for request in requests:
        assert said.tokens[request.request_id] == _whole_context(model, request)
    assert not kit.held_pages(loop)


@pytest.mark.parametrize("mode", ["plain", "graphs late"])
def test_fp8_pages_are_shared_preempted_and_filled_in_chunks_like_others(
    kit: Any, model: Transformer, mode: str
) -> None:
    """Chunks sum in another order than whole contexts, and a number may then be rounded to its neighbour: of
    six texts one may differ."""
    requests = [
        kit.request(f"r{i}", (*_prompt(40), *_prompt(1 + 9 * i, salt=i)), max_tokens=25) for i in range(6)
    ]
    loop = kit.engine(mode, model, _settings(full_pages=13, sliding_pages=14), full_fp8=True)
    for request in requests:
        loop.submit(request)
    said = kit.run(loop)
    assert said.of_type(SequencePreempted)
    assert loop.snapshot().prefix_hit_tokens > 0
    exact = [_whole_context(model, request, full_fp8=True) for request in requests]
    same = sum(said.tokens[r.request_id] == text for r, text in zip(requests, exact, strict=True))
    assert same >= 5
    assert not kit.held_pages(loop)


def test_a_prefill_engine_needs_no_output_projection(kit: Any, model: Transformer) -> None:
    config = model.config
    headless = Transformer(config, torch.float32, with_unembedding=False)
    fill(
        headless,
        ((name, tensor) for name, tensor in model.state_dict().items() if not name.startswith("unembedding")),
    )
    pair = kit.SplitPair(_settings(), _settings(), headless, model)
    requests = [
        kit.request(f"r{i}", _prompt(20 + 31 * i, salt=i), kind=RequestKind.REMOTE_KV, max_tokens=12)
        for i in range(4)
    ]
    for request in requests:
        pair.submit(request)
    said = pair.run()
    for request in requests:
        assert said.tokens[request.request_id] == _whole_context(model, request)
    assert not kit.held_pages(pair.decode)
    assert not kit.held_pages(pair.prefill)
