"""FP8 pages on the GPU: each kernel against the plain op, and the model against itself with bf16 pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels import reference
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.fp8_hopper import FewTokens, HopperFp8DecodeAttention
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write, hopper_prefill_attention
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.dense.rope import rope_and_write, rotation_table
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes, quantise
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S, D, GROUP = 64, 64, 8
SCALE = 0.125
BOUND = 5e-3
EDGES = [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000]


def heavy_tailed(*shape: int) -> Tensor:
    numbers = torch.randn(shape, device="cuda")
    return numbers * torch.where(torch.rand(shape, device="cuda") < 0.01, 50.0, 1.0)


def poisoned_pages(count: int, kv_heads: int, layers: int = 3) -> Fp8Pages:
    """Every number and every scale is NaN."""
    shape = count, layers, kv_heads, head_bytes(S, D)
    return Fp8Pages(torch.full(shape, 255, dtype=torch.uint8, device="cuda")[:, 1], S, D)


class Filled:
    """Sequences in shuffled FP8 pages; what nobody wrote is poison."""

    def __init__(self, lengths: list[int], queries: list[int], kv_heads: int = 8) -> None:
        torch.manual_seed(len(lengths) + kv_heads)
        each = -(-max(lengths) // S)
        total = len(lengths) * each + 1
        table = torch.randperm(total, device="cuda")[: total - 1].view(len(lengths), each)
        self.pages = poisoned_pages(total, kv_heads)
        for row, length in enumerate(lengths):
            position = torch.arange(length, device="cuda")
            slot = table[row, position // S] * S + position % S
            keys, values = (heavy_tailed(length, kv_heads, D) for _ in range(2))
            reference.write_kv(keys, values, self.pages, slot)
        starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
        self.query = torch.randn(starts[-1], GROUP * kv_heads, D, device="cuda").bfloat16()
        self.sinks = torch.randn(GROUP * kv_heads, device="cuda") * 2
        self.sequences = PagedSequences(
            table.int(),
            torch.tensor(starts, dtype=torch.int32, device="cuda"),
            torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            torch.zeros(starts[-1], dtype=torch.int64, device="cuda"),
        )

    def run(self, kernel: Fp8DecodeAttention | HopperFp8DecodeAttention) -> Tensor:
        out = torch.full_like(self.query, float("nan"))
        return kernel.full(self.query, self.pages, self.sequences, self.sinks, SCALE, out)

    def expected(self) -> Tensor:
        query = self.query.float()
        return reference.paged_attention(query, self.pages, self.sequences, self.sinks, None, SCALE)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3, 6, 13, 32])
def test_any_number_of_splits(splits: int, pdl: bool) -> None:
    filled = Filled(EDGES, [1] * len(EDGES))
    kernel = HopperFp8DecodeAttention(len(EDGES), 8, filled.query.device, splits=splits, pdl=pdl)
    out, expected = filled.run(kernel), filled.expected()
    for row in range(len(EDGES)):
        assert relative_error(out[row], expected[row]) <= BOUND
    assert torch.equal(out, filled.run(kernel)), "bit for bit from run to run"


@alone_and_beside_copies
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 32])
def test_every_launch_is_the_same(splits: int, pdl: bool, beside: bool) -> None:
    filled = Filled(EDGES, [1] * len(EDGES))
    kernel = HopperFp8DecodeAttention(len(EDGES), 8, filled.query.device, splits=splits, pdl=pdl)
    queries = filled.query, torch.randn_like(filled.query)

    def launch(turn: int, out: Tensor) -> None:
        kernel.full(queries[turn], filled.pages, filled.sequences, filled.sinks, SCALE, out)

    check_launches(launch, torch.full_like(filled.query, float("nan")), beside=beside)


@pytest.mark.parametrize("splits", [1, 5])
def test_the_portable_kernel_says_the_same(splits: int) -> None:
    filled = Filled(EDGES, [1] * len(EDGES), kv_heads=2)
    kernel = Fp8DecodeAttention(len(EDGES), 16, 2, D, filled.query.device, splits=splits)
    # It rounds the scaled query to bfloat16, and scores of heavy-tailed keys are large.
    assert relative_error(filled.run(kernel), filled.expected()) <= 4 * BOUND


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_of_a_rank(kv_heads: int) -> None:
    filled = Filled(EDGES, [1] * len(EDGES), kv_heads)
    kernel = HopperFp8DecodeAttention(len(EDGES), kv_heads, filled.query.device)
    assert relative_error(filled.run(kernel), filled.expected()) <= BOUND


def test_replayed_from_a_graph_it_follows_the_lengths() -> None:
    filled = Filled([100 + row % 150 for row in range(40)], [1] * 40)
    kernel = HopperFp8DecodeAttention(40, 8, filled.query.device, pdl=True)
    filled.run(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = filled.run(kernel)
    for shorter in (0, 37):
        filled.sequences.kv_len.sub_(shorter)
        graph.replay()
        assert relative_error(out, filled.expected()) <= BOUND


@pytest.mark.parametrize(
    ("lengths", "queries"), [([70], [70]), ([300, 129, 5], [33, 1, 5]), ([4161], [77]), ([2049], [1030])]
)
def test_chunks_continue_a_cached_prefix(lengths: list[int], queries: list[int]) -> None:
    filled = Filled(lengths, queries)
    wide = WidePages().widen(filled.pages, filled.sequences, torch.bfloat16)
    out = torch.full_like(filled.query, float("nan"))
    hopper_prefill_attention(
        *(filled.query, wide, filled.sequences, filled.sinks, None, SCALE, max(queries)), out=out
    )
    held = filled.sequences.block_table.unique().long()
    exact, found = filled.pages.widened(held), wide[held].float()
    written = exact.isfinite()
    assert bool(((found - exact).abs() <= exact.abs() * 2.0**-8)[written].all()), (
        "but for bfloat16's rounding"
    )
    plain = wide.float().nan_to_num(0.0)
    query = filled.query.float()
    expected = reference.paged_attention(query, plain, filled.sequences, filled.sinks, None, SCALE)
    assert relative_error(out, expected) <= BOUND


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_what_is_written_is_what_the_plain_op_writes(kv_heads: int) -> None:
    torch.manual_seed(8)
    tokens, heads = 300, GROUP * kv_heads
    qkv = heavy_tailed(tokens, (heads + 2 * kv_heads) * D).bfloat16()
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slot = torch.randperm(20 * S, device="cuda")[:tokens]
    slot[::9] = -1
    table = rotation_table(*reference.yarn_inv_freq(D, 150_000.0, 32.0, 4096, 32.0, 1.0), 5000).cuda()
    keep = slot >= 0
    for write in ("cuda", "triton"):
        pages, plain = poisoned_pages(20, kv_heads), torch.zeros(20, kv_heads, 2, S, D, device="cuda")
        plain = plain.bfloat16()
        queries = []
        for target in (pages, plain):
            query = torch.full((tokens, heads, D), float("nan"), device="cuda").bfloat16()
            arguments = (qkv, positions, slot, table, target)
            if write == "cuda":
                chunk_rope_and_write(*arguments, query)
            else:
                rope_and_write(*arguments, heads, query)
            queries.append(query)
        assert torch.equal(*queries)
        key, value = (plain[slot[keep] // S, :, half, slot[keep] % S] for half in range(2))
        expected = poisoned_pages(20, kv_heads)
        reference.write_kv(key, value, expected, slot[keep])
        assert torch.equal(pages.data, expected.data)


@pytest.mark.parametrize("pdl", [False, True])
def test_few_tokens_are_stored(pdl: bool) -> None:
    few = FewTokens(8, torch.device("cuda"))
    few.kv.copy_(heavy_tailed(*few.kv.shape))
    slot = torch.tensor([3, 65, -1, 127, 0], device="cuda")
    found, expected = poisoned_pages(2, 8), poisoned_pages(2, 8)
    few.store(found, slot, pdl=pdl)
    key, value = (few.kv[0, :, half, : len(slot)].transpose(0, 1) for half in range(2))
    reference.write_kv(key, value, expected, slot)
    assert torch.equal(found.data, expected.data)


@pytest.fixture(scope="module")
def model() -> CudaTransformer:
    config = replace(preset("gpt-oss-20b"), num_hidden_layers=4)
    return CudaTransformer(config, synthesize_parameters(config, 3, "cuda"), "cuda")


def step(tokens: Tensor, starts: list[int], counts: list[int], pages: int) -> ForwardBatch:
    """The next ``counts[b]`` tokens of each sequence b, whose pages are b * pages and the ones behind it."""
    rows = torch.arange(len(starts), device="cuda")
    table = (rows[:, None] * pages + torch.arange(pages, device="cuda")).int()
    position = torch.cat([torch.arange(a, a + n, device="cuda") for a, n in zip(starts, counts, strict=True)])
    row = rows.repeat_interleave(torch.tensor(counts, device="cuda"))
    slot = table[row, position // S].long() * S + position % S
    begins = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    ends = torch.tensor([a + n for a, n in zip(starts, counts, strict=True)], device="cuda").int()
    sequences = PagedSequences(table, begins, ends, slot)
    return ForwardBatch(tokens[row, position], position, sequences, sequences)


@pytest.mark.parametrize("batch", [1, 16, 20])
def test_a_model_with_fp8_pages_says_nearly_what_it_says_with_bf16_ones(
    model: CudaTransformer, batch: int
) -> None:
    """Two chunks and three decode steps, whose writes take different kernels by the batch size."""
    torch.manual_seed(batch)
    prompt, pages = 150, 3
    tokens = torch.randint(0, 199_998, (batch, prompt + 3), device="cuda")
    outcomes = []
    for fp8 in (False, True):
        cache = PagedKvCache(
            *(model.config,),
            full_pages=batch * pages,
            sliding_pages=batch * pages,
            page_size=S,
            dtype=torch.bfloat16,
            device="cuda",
            full_fp8=fp8,
        )
        for begin, end in ((0, 70), (70, prompt)):
            model.forward(step(tokens, [begin] * batch, [end - begin] * batch, pages), cache)
        logits = [
            model.logits(model.forward(step(tokens, [prompt + i] * batch, [1] * batch, pages), cache))
            for i in range(3)
        ]
        outcomes.append((cache, torch.cat(logits)))
    (plain, exact), (rounded, near) = outcomes
    assert bool(near.isfinite().all())
    # A random model amplifies any rounding: in bfloat16 its logits are 0.18 away from those in float32.
    assert relative_error(near, exact) <= 0.25
    # The first full layer's inputs are the same: its bytes are those of the other's numbers.
    pages_of, numbers = rounded.layer(1), plain.layer(1)
    assert isinstance(pages_of, Fp8Pages)
    assert isinstance(numbers, Tensor)
    codes, scales = quantise(numbers[: batch * pages])
    held = torch.arange(pages * S, device="cuda") < prompt + 3
    mask = held.view(1, pages, 1, 1, S).expand(batch, pages, 8, 2, S).reshape(-1, 8, 2, S)
    assert torch.equal(pages_of.scales[: batch * pages][mask], scales[mask])
    assert torch.equal(pages_of.codes[: batch * pages][mask], codes[mask])
