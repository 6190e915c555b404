"""The CUDA kernels of FP8 pages, thread by thread on the host, against the plain ops."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention.fp8_hopper import choose_fp8_splits
from antiphon.kernels.dense.rope import rotation_table
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences

S, D, GROUP = 64, 64, 8
SCALE = 0.125


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["attention/csrc/fp8_decode.cu", "attention/csrc/fp8_store.cu"])


@pytest.fixture(scope="module")
def rotation(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["attention/csrc/rope.cu"])


def pages_of(count: int, kv_heads: int, page_size: int = S, layers: int = 3) -> Fp8Pages:
    """The middle layer of several, poisoned: every number and every scale is NaN."""
    data = torch.full((count, layers, kv_heads, head_bytes(page_size, D)), 255, dtype=torch.uint8)
    return Fp8Pages(data[:, layers // 2], page_size, D)


def heavy_tailed(*shape: int) -> Tensor:
    return torch.randn(shape) * torch.where(torch.rand(shape) < 0.01, 50.0, 1.0)


class Filled:
    """One token each of sequences in shuffled pages; what nobody wrote is poison."""

    def __init__(self, lengths: list[int], kv_heads: int, scale: float = 1.0) -> None:
        torch.manual_seed(len(lengths) * 10 + kv_heads)
        each = max(1, -(-max(lengths) // S))
        total = len(lengths) * each + 1
        table = torch.randperm(total)[: total - 1].view(len(lengths), each)
        self.pages = pages_of(total, kv_heads)
        for row, length in enumerate(lengths):
            position = torch.arange(length)
            slot = table[row, position // S] * S + position % S
            keys, values = (heavy_tailed(length, kv_heads, D) * scale for _ in range(2))
            reference.write_kv(keys, values, self.pages, slot)
        self.query = torch.randn(len(lengths), GROUP * kv_heads, D).bfloat16()
        self.sinks = torch.randn(GROUP * kv_heads)
        self.sequences = PagedSequences(
            table.int(),
            torch.arange(len(lengths) + 1, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.zeros(len(lengths), dtype=torch.int64),
        )

    def decode(self, library: Any, splits: int) -> Tensor:
        batch, heads = self.query.shape[:2]
        out = torch.full_like(self.query, float("nan"))
        parts = [torch.full((batch, heads, splits, width), float("nan")) for width in (D, 1, 1)]
        table = self.sequences.block_table
        library.call(
            "fp8_decode",
            *(self.query, self.pages.data, table, self.sequences.kv_len, self.sinks, out, *parts),
            *(c_int64(self.pages.data.stride(0)), table.stride(0), batch, heads // GROUP, splits, SCALE, 0),
        )
        if splits == 1:
            return out.float()
        acc, peak, total = parts
        weight = torch.exp2(peak - peak.amax(2, keepdim=True))
        return (acc * weight).sum(2) / (total * weight).sum(2)

    def expected(self) -> Tensor:
        query = self.query.float()
        return reference.paged_attention(query, self.pages, self.sequences, self.sinks, None, SCALE)


def close(out: Tensor, expected: Tensor) -> None:
    assert bool(out.isfinite().all())
    assert float((out - expected).norm() / expected.norm()) <= 5e-3


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_all_keys_are_seen_at_every_length(library: Any, splits: int) -> None:
    filled = Filled([1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300], kv_heads=1)
    out, expected = filled.decode(library, splits), filled.expected()
    for row in range(len(expected)):
        close(out[row], expected[row])


def test_heads_read_their_own_kv_head_and_sinks(library: Any) -> None:
    filled = Filled([70, 200], kv_heads=2)
    for head, sink in ((0, 60.0), (9, -1e4)):
        filled.sinks[head] = sink
    out = filled.decode(library, 3)
    close(out, filled.expected())
    assert float(out[:, 0].abs().max()) < 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_numbers_of_any_size_are_scaled(library: Any, scale: float) -> None:
    """Scores of the large ones differ by far more than a softmax can tell: the best key takes all."""
    filled = Filled([100], kv_heads=1, scale=scale)
    close(filled.decode(library, 1), filled.expected())


def test_a_number_that_is_none_is_not_hidden(library: Any) -> None:
    for half in range(2):
        filled = Filled([40, 40], kv_heads=2)
        kv = [heavy_tailed(1, 2, D) for _ in range(2)]
        kv[half][0, 1, 5] = float("nan")
        page = int(filled.sequences.block_table[1, 0])
        reference.write_kv(*kv, filled.pages, torch.tensor([page * S + 3]))
        for out in (filled.decode(library, 1), filled.decode(library, 3), filled.expected()):
            assert bool(out[1, GROUP:].isnan().all())
            assert bool(out[0].isfinite().all())
            assert bool(out[1, :GROUP].isfinite().all())


def test_a_padding_row_sees_nothing(library: Any) -> None:
    filled = Filled([5, 0], kv_heads=1)
    assert not filled.decode(library, 1)[1].any()
    assert not filled.decode(library, 2)[1].any()


@pytest.mark.parametrize("page_size", [16, 64])
def test_few_tokens_are_stored_as_the_plain_op_stores_them(library: Any, page_size: int) -> None:
    torch.manual_seed(page_size)
    tokens, kv_heads, room = 5, 8, 16
    kv = (heavy_tailed(1, kv_heads, 2, room, D) * torch.logspace(-5, 5, room)[:, None]).bfloat16()
    kv[0, 3, 1, 0] = 0.0
    kv[0, 4, 0, 1, 7] = float("nan")
    slot = torch.tensor([3, page_size + 1, -1, 2 * page_size - 1, 0])
    found, expected = pages_of(3, kv_heads, page_size), pages_of(3, kv_heads, page_size)
    library.call(
        "fp8_store",
        *(kv, slot, found.data, c_int64(found.data.stride(0)), tokens, kv_heads, room, page_size, 0),
    )
    key, value = (kv[0, :, half, :tokens].transpose(0, 1) for half in range(2))
    reference.write_kv(key, value, expected, slot)
    nan = expected.scales.isnan()
    assert torch.equal(found.scales.isnan(), nan)
    assert torch.equal(found.scales[~nan], expected.scales[~nan])
    assert torch.equal(found.codes[~nan], expected.codes[~nan])
    assert bool((found.codes[nan] & 127).eq(127).all())


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_chunks_are_rotated_and_stored(rotation: Any, kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    tokens, heads = 7, GROUP * kv_heads
    qkv = heavy_tailed(tokens, (heads + 2 * kv_heads) * D).bfloat16()
    positions = torch.tensor([0, 1, 40, 41, 4095, 5000, 7])
    slot = torch.tensor([0, S + 3, 2 * S + 15, -1, 17, 33, 2 * S])
    inv_freq, concentration = reference.yarn_inv_freq(D, 150_000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq, concentration, 5001)
    found, expected, plain = pages_of(3, kv_heads), pages_of(3, kv_heads), torch.zeros(3, kv_heads, 2, S, D)
    plain = plain.bfloat16()
    query = [torch.full((tokens, heads, D), float("nan")).bfloat16() for _ in range(2)]
    for out, pages, stride, fp8 in (
        (query[0], plain, plain.stride(0), 0),
        (query[1], found.data, found.data.stride(0), 1),
    ):
        rotation.call(
            "chunk_rope",
            *(qkv, positions, slot, table, out, pages, c_int64(stride), tokens, kv_heads, S, fp8, 0),
        )
    assert torch.equal(*query)
    keep = slot >= 0
    page, offset = slot[keep] // S, slot[keep] % S
    key, value = (plain[page, :, half, offset] for half in range(2))
    reference.write_kv(key, value, expected, slot[keep])
    assert torch.equal(found.data, expected.data)


def test_splits_fill_the_last_wave_of_blocks() -> None:
    assert [choose_fp8_splits(batch, 8) for batch in (1, 8, 16, 32, 128)] == [32, 6, 3, 3, 1]
    for batch in range(1, 200):
        assert 1 <= choose_fp8_splits(batch, 8) <= 32
