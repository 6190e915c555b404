"""FP8 pages through the fast model, its Triton kernels in the interpreter: chunks, then decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels.fp8_pages import Fp8Pages, quantise
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_roads import Road
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch, ReservesForPages

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes with numpy
]
PAGE, TOKENS = 16, 40
TABLE = torch.tensor([[2, 0, 3]], dtype=torch.int32)


def step(tokens: Tensor, start: int, end: int) -> ForwardBatch:
    """Positions ``start : end`` of one sequence."""
    position = torch.arange(start, end)
    slot = TABLE[0, position // PAGE].long() * PAGE + position % PAGE
    begins = torch.tensor([0, end - start], dtype=torch.int32)
    pages = PagedSequences(TABLE, begins, torch.tensor([end], dtype=torch.int32), slot)
    return ForwardBatch(tokens[start:end], position, pages, pages)


def test_chunks_and_decode_steps_over_fp8_pages(spread_config: GptOssConfig) -> None:
    config = replace(
        spread_config,
        num_hidden_layers=2,
        intermediate_size=128,
        num_experts=4,
        experts_per_token=2,
        sliding_window=16,
    )
    model = CudaTransformer(config, synthesize_parameters(config, seed=6), "cpu", road=Road.PORTABLE)
    assert isinstance(model, ReservesForPages)
    tokens = torch.randint(0, config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(2))
    outcomes: list[tuple[PagedKvCache, list[Tensor]]] = []
    for full_fp8 in (False, True):
        cache = PagedKvCache(
            config, full_pages=4, sliding_pages=4, page_size=PAGE, dtype=torch.bfloat16, full_fp8=full_fp8
        )
        model.reserve_for_chunks(cache)
        steps = ((0, 19), (19, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS))
        outcomes.append((cache, [model.forward(step(tokens, *each), cache) for each in steps]))
    (plain, exact), (rounded, near) = outcomes
    for one, other in zip(near, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.02
    # Up to the full layer both computed the same, so its bytes are those of the other's numbers.
    pages, numbers = rounded.layer(1), plain.layer(1)
    assert isinstance(pages, Fp8Pages)
    assert isinstance(numbers, Tensor)
    codes, scales = quantise(numbers)
    for position in range(TOKENS):
        page, offset = int(TABLE[0, position // PAGE]), position % PAGE
        assert torch.equal(pages.codes[page, :, :, offset], codes[page, :, :, offset])
        assert torch.equal(pages.scales[page, :, :, offset], scales[page, :, :, offset])
    assert not pages.data[1].any(), "a page of nobody"
    assert not pages.data[4].any()
    # What is read are these bytes.
    for begin, seen in ((TOKENS - 1, near[3]), (19, near[1])):
        pages.scales[2].mul_(64)
        assert not torch.equal(model.forward(step(tokens, begin, begin + len(seen)), rounded), seen)
        pages.scales[2].div_(64)
