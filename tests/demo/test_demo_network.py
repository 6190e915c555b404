"""The trainable twin computes what the reference kernels define, whichever attention it uses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from antiphon.demo.network import (
    Packing,
    TinyGptOss,
    dense_visibility,
    flex_attend,
    flex_visibility,
    masked_attend,
    mxfp4_rounded,
    placement,
)
from antiphon.demo.shape import TINY
from antiphon.kernels.reference import dequantize_mxfp4, quantize_mxfp4

SMALL = dataclasses.replace(TINY, num_hidden_layers=2, hidden_size=128, intermediate_size=128)


def test_rounding_in_the_loop_is_that_of_the_checkpoint() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 16, 128, generator=generator) * torch.logspace(-3, 2, 128)
    weight[0, 0, :32] = 0
    assert torch.equal(mxfp4_rounded(weight), dequantize_mxfp4(quantize_mxfp4(weight)))


def attend_both(device: str, backwards: bool) -> list[tuple[torch.Tensor | None, ...]]:
    """Output, and gradients if asked for, of plain and of flex attention on the same packed rows."""
    documents = torch.tensor([[1] * 70 + [2] * 150 + [3] * 36, [0] * 30 + [1] * 170 + [2] * 56]).int()
    positions = [[*range(70), *range(150), *range(36)], [*range(200), *range(30, 86)]]
    packing = Packing(documents.to(device), torch.tensor(positions).int().to(device))
    results = []
    for attend, visibility in ((masked_attend, dense_visibility), (flex_attend, flex_visibility)):
        generator = torch.Generator().manual_seed(1)
        q, k, v, weight = (torch.randn(2, n, 256, 64, generator=generator).to(device) for n in (8, 4, 4, 8))
        sinks = torch.linspace(-1, 2, 8, device=device)
        leaves = [tensor.requires_grad_(backwards) for tensor in (q, k, v, sinks)]
        seen = visibility(packing, 50)
        out = attend(q, k, v, sinks, seen.full, 0.125) + attend(q, k, v, sinks, seen.sliding, 0.125)
        if backwards:
            (out * weight).sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves if backwards)))
    return results


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_with_sinks_equals_plain_attention() -> None:
    plain, flex = attend_both("cpu", backwards=False)
    torch.testing.assert_close(flex[0], plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_with_sinks_has_the_gradients_of_plain_attention() -> None:
    for plain, flex in zip(*attend_both("cuda", backwards=True), strict=True):
        torch.testing.assert_close(flex, plain, rtol=1e-3, atol=1e-3)


def test_window_counts_the_query_itself() -> None:
    seen = dense_visibility(Packing.of_documents(torch.ones(1, 300, dtype=torch.int32)), 128)
    assert isinstance(seen.sliding, torch.Tensor)
    assert int(seen.sliding[0, 0, 299].sum()) == 128


def test_a_conversation_does_not_see_its_neighbours_in_a_row() -> None:
    torch.manual_seed(0)
    model = TinyGptOss(SMALL, 50, 1000)
    rows = torch.randint(0, 50, (1, 64))
    documents = torch.tensor([[1] * 40 + [2] * 24], dtype=torch.int32)
    whole, _ = model(rows, placement(SMALL, Packing.of_documents(documents), False, torch.float32))
    packed = Packing.of_documents(documents[:, 40:])
    alone, _ = model(rows[:, 40:], placement(SMALL, packed, False, torch.float32))
    torch.testing.assert_close(whole[:, 40:], alone, rtol=1e-3, atol=1e-4)  # rotary positions are relative


def test_conversations_of_a_row_see_the_shared_opening_as_if_each_began_with_it() -> None:
    torch.manual_seed(0)
    model = TinyGptOss(SMALL, 50, 1000)
    opening, first, second = torch.randint(0, 50, (1, 150)).split((30, 70, 50), 1)
    documents = torch.tensor([[0] * 30 + [1] * 70 + [2] * 50])
    positions = torch.tensor([[*range(100), *range(30, 80)]])
    rows = torch.cat((opening, first, second), 1)
    whole, _ = model(rows, placement(SMALL, Packing(documents, positions), False, torch.float32))
    for conversation, place in ((first, slice(30, 100)), (second, slice(100, 150))):
        own = torch.cat((opening, conversation), 1)
        packed = Packing.of_documents(torch.ones_like(own))
        alone, _ = model(own, placement(SMALL, packed, False, torch.float32))
        torch.testing.assert_close(whole[:, place], alone[:, 30:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("unseen", [1, 1000])
def test_the_unseen_column_stands_for_that_many_equal_rows(unseen: int) -> None:
    torch.manual_seed(0)
    model = TinyGptOss(SMALL, 50, unseen)
    with torch.no_grad():
        model.unseen_output.normal_()
    hidden = torch.randn(3, 128)
    scores = model.logits(hidden)
    one = hidden @ model.unseen_output.bfloat16().float().squeeze(0)
    full = torch.cat((scores[:, :-1], one[:, None].expand(-1, unseen)), 1)
    torch.testing.assert_close(scores.logsumexp(-1), full.logsumexp(-1), rtol=1e-5, atol=1e-4)
