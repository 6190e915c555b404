"""Projections and sampling of decode steps on the GPU against the plain ops."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.engine.sampling_math import draw_by_id, lowest_best, scaled_weights
from antiphon.kernels import reference
from antiphon.kernels.dense import skinny
from antiphon.kernels.dense.rope import rotation_table
from antiphon.kernels.sampling import choose_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUERY_HEADS, KV_HEADS, PAGE, VOCABULARY = 64, 8, 64, 201_088


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16])
def test_qkv_rotation_and_page_write(tokens: int, pdl: bool) -> None:
    torch.manual_seed(tokens)
    rows = (QUERY_HEADS + 2 * KV_HEADS) * 64
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    inv_freq = inv_freq.cuda()
    table = rotation_table(inv_freq, concentration, 5000)
    x, weight, bias = bf16(tokens, skinny.HIDDEN), bf16(rows, skinny.HIDDEN, scale=1 / 54), bf16(rows)
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slot = torch.randperm(3 * PAGE, device="cuda")[:tokens].contiguous()
    slot[tokens // 2] = -1
    cache = torch.full((3, 2, KV_HEADS, 2, PAGE, 64), 9.0, device="cuda").bfloat16()
    plain = cache.float()
    query = torch.full((tokens, QUERY_HEADS, 64), float("nan"), device="cuda").bfloat16()
    arguments = (x, weight, bias, positions, slot, table, cache[:, 1], query)
    skinny.qkv_rope(*arguments, pdl=pdl)
    first = query.clone()
    skinny.qkv_rope(*arguments, pdl=pdl)
    assert torch.equal(query, first), "bit for bit from run to run"
    qkv = reference.linear(x.float(), weight.float(), bias.float()).view(tokens, -1, 64)
    q, k, v = qkv.split([QUERY_HEADS, KV_HEADS, KV_HEADS], 1)
    reference.write_kv(reference.rope(k, positions, inv_freq, concentration), v, plain[:, 1], slot)
    assert relative_error(query, reference.rope(q, positions, inv_freq, concentration)) <= 3e-3
    assert relative_error(cache, plain) <= 3e-3
    assert torch.equal(cache[:, 0].float(), plain[:, 0])


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_every_qkv_is_the_same(tokens: int, pdl: bool, beside: bool) -> None:
    torch.manual_seed(tokens)
    rows = (QUERY_HEADS + 2 * KV_HEADS) * 64
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq.cuda(), concentration, 5000)
    x, weight, bias = bf16(2, tokens, skinny.HIDDEN), bf16(rows, skinny.HIDDEN, scale=1 / 54), bf16(rows)
    positions = torch.randint(0, 5000, (2, tokens), device="cuda")
    slot = torch.randperm(PAGE, device="cuda")[:tokens].contiguous()

    def launch(turn: int, query: Tensor, pages: Tensor) -> None:
        skinny.qkv_rope(x[turn], weight, bias, positions[turn], slot, table, pages, query, pdl=pdl)

    query = torch.full((tokens, QUERY_HEADS, 64), float("nan"), device="cuda").bfloat16()
    check_launches(launch, query, bf16(1, KV_HEADS, 2, PAGE, 64), beside=beside)


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_every_output_projection_is_the_same(tokens: int, pdl: bool, beside: bool) -> None:
    torch.manual_seed(tokens)
    rows = skinny.HIDDEN
    x, weight = bf16(2, tokens, skinny.QUERY_WIDTH), bf16(rows, skinny.QUERY_WIDTH, scale=1 / 64)
    bias = bf16(rows)

    def launch(turn: int, residual: Tensor) -> None:
        skinny.output_projection_(x[turn], weight, bias, residual, pdl=pdl)

    check_launches(launch, bf16(tokens, rows), beside=beside)


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("width", skinny.PART_WIDTHS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_part_of_the_output_projection_is_the_same(
    tokens: int, width: int, pdl: bool, beside: bool
) -> None:
    torch.manual_seed(tokens)
    rows = skinny.HIDDEN
    x, weight, bias = bf16(2, tokens, width), bf16(rows, width, scale=width**-0.5), bf16(rows)

    def launch(turn: int, out: Tensor) -> None:
        out.copy_(skinny.partial_projection(x[turn], weight, bias, pdl=pdl))

    check_launches(launch, torch.full((tokens, rows), float("nan"), device="cuda").bfloat16(), beside=beside)


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_all_logits_are_the_same(tokens: int, pdl: bool, beside: bool) -> None:
    torch.manual_seed(tokens)
    x, weight = bf16(2, tokens, skinny.HIDDEN), bf16(VOCABULARY, skinny.HIDDEN, scale=1 / 54)

    def launch(turn: int, out: Tensor) -> None:
        skinny.logits(x[turn], weight, out, pdl=pdl)

    check_launches(launch, torch.full((tokens, VOCABULARY), float("nan"), device="cuda"), beside=beside)


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_every_choice_is_the_same(rows: int, draws: bool, pdl: bool, beside: bool) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(2, rows, VOCABULARY, device="cuda") * 3
    inverse = torch.linspace(0.5, 2.0, rows, dtype=torch.float64, device="cuda") if draws else None
    uniforms = torch.rand(rows, dtype=torch.float64, device="cuda") if draws else None

    def launch(turn: int, sampled: Tensor) -> None:
        choose_tokens(logits[turn], sampled, inverse, uniforms, pdl)

    check_launches(launch, torch.full((rows,), -1, device="cuda"), beside=beside)


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_output_projection_adds_to_the_residual(tokens: int) -> None:
    torch.manual_seed(tokens)
    rows = skinny.HIDDEN
    x, weight = bf16(tokens, skinny.QUERY_WIDTH), bf16(rows, skinny.QUERY_WIDTH, scale=1 / 64)
    bias, residual = bf16(rows), bf16(tokens + 1, rows)
    expected = residual.float()
    expected[:tokens] += reference.linear(x.float(), weight.float(), bias.float())
    skinny.output_projection_(x, weight, bias, residual[:tokens], pdl=True)
    assert relative_error(residual, expected) <= 3e-3
    assert torch.equal(residual[tokens].float(), expected[tokens])


@pytest.mark.parametrize("width", skinny.PART_WIDTHS)
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_parts_of_the_output_projection(tokens: int, width: int) -> None:
    torch.manual_seed(tokens)
    rows = skinny.HIDDEN
    x, weight, bias = bf16(tokens, width), bf16(rows, width, scale=width**-0.5), bf16(rows)
    out = skinny.partial_projection(x, weight, bias, pdl=True)
    assert relative_error(out, reference.linear(x.float(), weight.float(), bias.float())) <= 3e-3


@pytest.mark.parametrize("query_heads", [8, 16, 32])
def test_qkv_of_a_ranks_heads(query_heads: int) -> None:
    """Eight, four and two ranks; of the query, the keys and the values each its part of the heads."""
    torch.manual_seed(query_heads)
    kv_heads, tokens = query_heads // 8, 3
    rows = (query_heads + 2 * kv_heads) * 64
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    inv_freq = inv_freq.cuda()
    x, weight, bias = bf16(tokens, skinny.HIDDEN), bf16(rows, skinny.HIDDEN, scale=1 / 54), bf16(rows)
    positions, slot = torch.tensor([5, 4000, 0], device="cuda"), torch.tensor([3, -1, 70], device="cuda")
    pages = torch.full((2, kv_heads, 2, PAGE, 64), 9.0, device="cuda").bfloat16()
    plain = pages.float()
    query = torch.full((tokens, query_heads, 64), float("nan"), device="cuda").bfloat16()
    table = rotation_table(inv_freq, concentration, 5000)
    skinny.qkv_rope(x, weight, bias, positions, slot, table, pages, query, pdl=True)
    qkv = reference.linear(x.float(), weight.float(), bias.float()).view(tokens, -1, 64)
    q, k, v = qkv.split([query_heads, kv_heads, kv_heads], 1)
    reference.write_kv(reference.rope(k, positions, inv_freq, concentration), v, plain, slot)
    assert relative_error(query, reference.rope(q, positions, inv_freq, concentration)) <= 3e-3
    assert relative_error(pages, plain) <= 3e-3


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_logits(tokens: int) -> None:
    torch.manual_seed(tokens)
    x, weight = bf16(tokens, skinny.HIDDEN), bf16(20_104, skinny.HIDDEN, scale=1 / 54)
    logits = torch.full((tokens, 20_104), float("nan"), device="cuda")
    skinny.logits(x, weight, logits, pdl=True)
    assert relative_error(logits, x.double() @ weight.double().T) <= 1e-5


def test_more_tokens_or_other_types_are_refused() -> None:
    weight = bf16(16, skinny.HIDDEN)
    with pytest.raises(ValueError, match="17 tokens"):
        skinny.logits(bf16(17, skinny.HIDDEN), weight, torch.empty(17, 16, device="cuda"))
    with pytest.raises(ValueError, match="x is"):
        skinny.logits(bf16(2, skinny.HIDDEN).float(), weight, torch.empty(2, 16, device="cuda"))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_sampling_follows_its_definition(rows: int, pdl: bool) -> None:
    torch.manual_seed(rows)
    logits = (torch.randn(rows, VOCABULARY, device="cuda") * 3).bfloat16().float()
    sampled = torch.full((rows,), -1, device="cuda")
    choose_tokens(logits, sampled, pdl=pdl)
    best = lowest_best(logits.cpu())
    assert torch.equal(sampled.cpu(), best)
    inverse = torch.linspace(0.5, 2.0, rows, dtype=torch.float64, device="cuda")
    uniforms = torch.rand(rows, dtype=torch.float64, device="cuda")
    out = choose_tokens(logits, sampled, inverse, uniforms, pdl)
    expected = draw_by_id(scaled_weights(logits, inverse[:, None], None), uniforms[:, None])
    different = int((sampled != expected).sum())
    print(f"{different} of {rows} draws differ")
    # Exponentials may differ in their last bit, which moves a draw only at the very edge of a token's share.
    assert different <= rows // 100
    assert torch.equal(out[:, 0].long(), sampled)
    assert not out[:, 1].any()
