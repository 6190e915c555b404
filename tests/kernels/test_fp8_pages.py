"""FP8 pages: what they hold, and the plain and the Triton kernels that write and read them (interpreted)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.fp8_hopper import HopperFp8DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.dense.rope import rope_and_write, rotation_table
from antiphon.kernels.fp8_pages import MIN_SCALE, Fp8Pages, dequantise, head_bytes, quantise
from antiphon.kernels.reference import PagedSequences

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)
Q, G, D, S = 16, 2, 64, 64
SCALE = 0.125
EDGES = [1, 63, 64, 65, 127, 128, 129, 130, 300]
OF_PAGES = [1, 65, 300]
"""One page, two and five: among many more splits than pages nothing else makes a difference."""


def pages_of(count: int, kv_heads: int = G, page_size: int = S, layers: int = 3) -> Fp8Pages:
    """The middle layer of several, every byte of which is 255: numbers and scales are NaN."""
    data = torch.full((count, layers, kv_heads, head_bytes(page_size, D)), 255, dtype=torch.uint8)
    return Fp8Pages(data[:, layers // 2], page_size, D)


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """A token in 16 has a few coordinates that are 50 times the others', as keys of transformers do."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    outliers = torch.rand(shape, generator=generator) < 0.01
    return numbers * torch.where(outliers, 50.0, 1.0)


class Filled:
    """Sequences in shuffled FP8 pages; what nobody wrote is poison, in the table too."""

    def __init__(self, lengths: list[int], queries: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        each = -(-max(lengths) // S)
        total = len(lengths) * each + 1
        table = torch.randperm(total, generator=generator)[: total - 1].view(len(lengths), each)
        self.pages = pages_of(total)
        for row, length in enumerate(lengths):
            position = torch.arange(length)
            slot = table[row, position // S] * S + position % S
            keys, values = (heavy_tailed(length, G, D, seed=seed + row + i) for i in (0, 1000))
            reference.write_kv(keys, values, self.pages, slot)
            table[row, -(-length // S) :] = -7
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        tokens = int(starts[-1])
        self.query = torch.randn(tokens, Q, D, generator=generator)
        self.sinks = torch.randn(Q, generator=generator)
        self.sequences = PagedSequences(
            table.int(), starts, torch.tensor(lengths, dtype=torch.int32), torch.zeros(tokens).long()
        )

    def expected(self) -> Tensor:
        out = reference.paged_attention(self.query, self.pages, self.sequences, self.sinks, None, SCALE)
        assert bool(out.isfinite().all())
        return out


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan"))


def test_a_scale_maps_the_largest_number_to_448() -> None:
    numbers = torch.zeros(6, D)
    numbers[:, 3] = torch.tensor([448.0, -1.75, 1e-3, 0.0, 1e30, 77.7])
    codes, scales = quantise(numbers)
    assert scales.dtype == torch.bfloat16
    back = dequantise(codes, scales)
    assert codes[:, 3].tolist() == [0x7E, 0xFE, 0x7E, 0x00, 0x7E, 0x7E]
    torch.testing.assert_close(back[:, 3], numbers[:, 3], rtol=2.0**-8, atol=0.0)
    assert float(scales[3]) == MIN_SCALE
    assert not back[:, 4].any()
    assert bool((quantise(torch.full((1, D), float("nan")))[0] & 127).eq(127).all())


def test_what_comes_back_is_within_a_sixteenth() -> None:
    numbers = heavy_tailed(4096, D) * torch.logspace(-6, 6, 4096)[:, None]
    back = dequantise(*quantise(numbers))
    peak = numbers.abs().amax(-1, keepdim=True)
    # Half a unit in the last place of 4 bits, and of the smallest numbers below 2^-6 of the scale.
    bound = torch.maximum(numbers.abs() * 2.0**-4, peak * 2.0**-9 / 448 / 2) * (1 + 2.0**-7)
    assert bool(((back - numbers).abs() <= bound).all())


def test_pages_of_another_shape_are_refused() -> None:
    for size, page in ((head_bytes(S, D) - 1, S), (head_bytes(S, D), 32), (head_bytes(24, D), 24)):
        with pytest.raises(ValueError, match="a multiple of 16"):
            Fp8Pages(torch.zeros(2, G, size, dtype=torch.uint8), page, D)
    with pytest.raises(ValueError, match="expected uint8"):
        Fp8Pages(torch.zeros(2, G, head_bytes(S, D)), S, D)


def test_a_write_touches_its_slots_alone() -> None:
    pages = pages_of(3, page_size=16)
    before = pages.data.clone()
    key, value = heavy_tailed(3, G, D), heavy_tailed(3, G, D, seed=1)
    reference.write_kv(key, value, pages, torch.tensor([5, -1, 16 + 15]))
    for token, page, offset in ((0, 0, 5), (2, 1, 15)):
        found = pages.widened(torch.tensor([page]))[0, :, :, offset]
        expected = torch.stack([dequantise(*quantise(x[token])) for x in (key, value)], 1)
        assert torch.equal(found, expected)
    touched = Fp8Pages(before, 16, D)
    for page, offset in ((0, 5), (1, 15)):
        touched.codes[page, :, :, offset] = pages.codes[page, :, :, offset]
        touched.scales[page, :, :, offset] = pages.scales[page, :, :, offset]
    assert torch.equal(before, pages.data)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [1, 2, 5, 64])
def test_decode_counts_the_sink_once_for_any_split_count(splits: int, dtype: torch.dtype) -> None:
    lengths = EDGES if splits <= 5 else OF_PAGES
    filled = Filled(lengths, [1] * len(lengths))
    query = filled.query.to(dtype)
    kernel = Fp8DecodeAttention(len(lengths), Q, G, D, query.device, splits=splits)
    out = kernel.full(query, filled.pages, filled.sequences, filled.sinks, SCALE, poisoned(query))
    tolerance = (1e-4, 1e-5) if dtype is torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(out.float(), filled.expected(), rtol=tolerance[0], atol=tolerance[1])


@interpreted
@pytest.mark.parametrize(
    ("lengths", "queries"), [([70], [70]), ([300, 129, 5], [33, 1, 5]), ([130], [2]), ([257], [129])]
)
def test_chunks_continue_a_cached_prefix(lengths: list[int], queries: list[int]) -> None:
    filled = Filled(lengths, queries, seed=2)
    wide = WidePages().widen(filled.pages, filled.sequences, torch.float32)
    out = prefill_attention(
        *(filled.query, wide, filled.sequences, filled.sinks, None, SCALE, max(queries)),
        out=poisoned(filled.query),
    )
    torch.testing.assert_close(out, filled.expected(), rtol=1e-4, atol=1e-3)


@interpreted
def test_pages_that_nobody_asks_for_are_not_widened() -> None:
    filled = Filled([130, 1], [1, 1])
    room = WidePages()
    room.reserve(filled.pages, torch.float32).fill_(9.0)
    wide = room.widen(filled.pages, filled.sequences, torch.float32)
    held = sorted(filled.sequences.block_table[filled.sequences.block_table >= 0].tolist())
    untouched = [page for page in range(len(wide)) if page not in held]
    assert len(held) == 4
    assert bool(wide[untouched].eq(9.0).all())
    whole = filled.sequences.block_table[:1, 0].long()
    assert torch.equal(wide[whole], filled.pages.widened(whole))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_rotation_writes_the_bytes_of_the_plain_op(kv_heads: int) -> None:
    tokens, heads, page = 11, 2 * kv_heads, 16
    qkv = heavy_tailed(tokens, (heads + 2 * kv_heads) * D) * torch.logspace(-4, 4, tokens)[:, None]
    qkv[3, -D:] = 0.0
    positions = torch.arange(tokens) * 37
    slot = torch.randperm(3 * page)[:tokens]
    slot[4] = -1
    inv_freq, concentration = reference.yarn_inv_freq(D, 150_000.0, 32.0, 4096, 32.0, 1.0)
    table = rotation_table(inv_freq, concentration, 400)
    found, expected = pages_of(3, kv_heads, page), pages_of(3, kv_heads, page)
    query = torch.empty(tokens, heads, D)
    rope_and_write(qkv, positions, slot, table, found, heads, query)
    parts = qkv.view(tokens, -1, D)
    cos, sin = table[positions, :, 0][:, None], table[positions, :, 1][:, None]
    first, second = parts[..., : D // 2], parts[..., D // 2 :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    reference.write_kv(turned[:, heads:-kv_heads], parts[:, -kv_heads:], expected, slot)
    torch.testing.assert_close(query, turned[:, :heads])
    assert torch.equal(found.data, expected.data)
    qkv[0, -D] = float("nan")
    rope_and_write(qkv, positions, slot, table, found, heads, query)
    page_of, offset = divmod(int(slot[0]), page)
    assert bool(found.scales[page_of, -1, 1, offset].isnan())
    assert bool((found.codes[page_of, -1, 1, offset] & 127).eq(127).all())


@pytest.mark.parametrize("batch", [1, 7, 64, 99, 100, 256])
def test_kernels_of_all_batch_sizes_hold_little_memory(batch: int) -> None:
    """A step may have any number of decoding sequences; each number has a kernel that keeps its memory."""
    cpu = torch.device("cpu")
    for kernel in (HopperFp8DecodeAttention(batch, 8, cpu), Fp8DecodeAttention(batch, 64, 8, 64, cpu)):
        parts = kernel._parts
        held = sum(each.nbytes for each in (parts.acc, parts.max, parts.sum))
        assert held <= 4 * 2**20
        assert (held == 0) == (kernel.splits == 1)
