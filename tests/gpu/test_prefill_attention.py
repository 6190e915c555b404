"""The CUDA prefill attention on the GPU against the plain op in float32."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write, hopper_prefill_attention
from antiphon.kernels.dense.rope import rope_and_write, rotation_table
from antiphon.kernels.reference import PagedSequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S, D = 64, 64
SCALE = 0.125
BOUND = 5e-3


def paged(
    lengths: list[int], queries: list[int], kv_heads: int = 8, layers: int = 3
) -> tuple[Tensor, PagedSequences, Tensor, Tensor]:
    """A cache in shuffled pages whose unwritten positions hold NaN."""
    batch, pages = len(lengths), max(max(-(-n // S) for n in lengths), 1)
    total = batch * pages + 3
    cache = torch.full((total, layers, kv_heads, 2, S, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(total, device="cuda")[: batch * pages].reshape(batch, pages).int()
    for row, length in enumerate(lengths):
        for page in range(-(-length // S)):
            written = min(S, length - page * S)
            shape = (layers, kv_heads, 2, written, D)
            cache[int(table[row, page]), :, :, :, :written] = torch.randn(shape, device="cuda").bfloat16()
        table[row, -(-length // S) :] = -7
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    tokens = int(starts[-1])
    query = torch.randn(tokens, 8 * kv_heads, D, device="cuda").bfloat16()
    sinks = torch.randn(8 * kv_heads, device="cuda") * 2
    sequences = PagedSequences(
        table,
        starts,
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
    )
    return cache[:, layers // 2], sequences, query, sinks


def check(
    lengths: list[int], queries: list[int], window: int | None, kv_heads: int = 8, ordered: bool = True
) -> None:
    layer, sequences, query, sinks = paged(lengths, queries, kv_heads)

    def run() -> Tensor:
        out = torch.full_like(query, float("nan"))
        arguments = (query, layer, sequences, sinks, window, SCALE, max(queries), out)
        return hopper_prefill_attention(*arguments, ordered=ordered)

    out = run()
    expected = reference.paged_attention(
        query.float(), layer.nan_to_num(0.0).float(), sequences, sinks, window, SCALE
    )
    assert relative_error(out, expected) <= BOUND
    assert torch.equal(out, run())


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1], [1]),
        ([23], [23]),
        ([70], [70]),
        ([128], [128]),
        ([129], [129]),
        ([1000], [1000]),
        ([300, 129, 5], [33, 1, 5]),
        ([4161], [77]),
        ([2049], [1030]),
    ],
)
def test_matches_the_plain_op(
    lengths: list[int], queries: list[int], window: int | None, ordered: bool
) -> None:
    torch.manual_seed(sum(lengths))
    check(lengths, queries, window, ordered=ordered)


@alone_and_beside_copies
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([300, 129, 5], [33, 1, 5]), ([2049], [1030]), ([3000, 1, 2000], [3000, 1, 900])],
)
def test_every_launch_is_the_same(
    lengths: list[int], queries: list[int], window: int | None, ordered: bool, beside: bool
) -> None:
    """Chunks of several sequences, one behind a prefix, and more items than blocks."""
    torch.manual_seed(sum(lengths))
    layer, sequences, query, sinks = paged(lengths, queries)
    both = query, torch.randn_like(query)

    def launch(turn: int, out: Tensor) -> None:
        arguments = (both[turn], layer, sequences, sinks, window, SCALE, max(queries), out)
        hopper_prefill_attention(*arguments, ordered=ordered)

    check_launches(launch, torch.full_like(query, float("nan")), beside=beside)


@pytest.mark.parametrize("window", [127, 128, 129, 130])
@pytest.mark.parametrize("length", [190, 191, 192, 193, 255, 257])
def test_windows_end_where_they_should(window: int, length: int) -> None:
    torch.manual_seed(window)
    check([length], [60], window)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_of_a_rank(kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    check([700], [300], None, kv_heads)


def test_more_items_than_blocks_in_every_wave() -> None:
    torch.manual_seed(5)
    check([3000, 1, 2000], [3000, 1, 900], None, ordered=False)
    check([3000, 1, 2000], [3000, 1, 900], 128)


def test_pages_that_fell_out_of_the_window_may_be_gone() -> None:
    torch.manual_seed(6)
    layer, sequences, query, sinks = paged([1000], [100], layers=1)
    before = torch.full_like(query, float("nan"))
    hopper_prefill_attention(query, layer, sequences, sinks, 128, SCALE, 100, before)
    first = (1000 - 100 - 127) // S
    layer[sequences.block_table[0, :first].long()] = float("nan")
    sequences.block_table[0, :first] = -3
    after = torch.full_like(query, float("nan"))
    hopper_prefill_attention(query, layer, sequences, sinks, 128, SCALE, 100, after)
    assert torch.equal(before, after)


def test_a_large_sink_takes_all_weight_and_scores_may_be_large() -> None:
    torch.manual_seed(7)
    layer, sequences, query, sinks = paged([500], [500])
    query *= 30
    sinks[3] = 1e4
    out = hopper_prefill_attention(query, layer, sequences, sinks, None, SCALE, 500)
    expected = reference.paged_attention(
        query.float(), layer.nan_to_num(0.0).float(), sequences, sinks, None, SCALE
    )
    assert not out[:, 3].any()
    assert relative_error(out, expected) <= BOUND


def test_a_padding_row_sees_nothing() -> None:
    layer, sequences, query, sinks = paged([200, 0], [50, 1])
    out = torch.full_like(query, float("nan"))
    hopper_prefill_attention(query, layer, sequences, sinks, None, SCALE, 50, out)
    assert not out[50].any()
    assert not out[:50].isnan().any()


def test_foreign_shapes_are_refused() -> None:
    layer, sequences, query, sinks = paged([100], [10])
    with pytest.raises(ValueError, match="8 kv heads"):
        hopper_prefill_attention(query[:, :32].contiguous(), layer, sequences, sinks, None, SCALE, 10)
    with pytest.raises(ValueError, match="kv_layer is"):
        hopper_prefill_attention(query, layer[:, :, :, :32], sequences, sinks, None, SCALE, 10)


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_rotation_equals_the_triton_twin(kv_heads: int) -> None:
    torch.manual_seed(8)
    tokens, heads = 300, 8 * kv_heads
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * D, device="cuda").bfloat16()
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slots = torch.randperm(20 * S, device="cuda")[:tokens]
    slots[::9] = -1
    table = rotation_table(*reference.yarn_inv_freq(D, 150_000.0, 32.0, 4096, 32.0, 1.0), 5000).cuda()
    found, expected = [], []
    for results in (found, expected):
        cache = torch.zeros(20, 2, kv_heads, 2, S, D, device="cuda", dtype=torch.bfloat16)
        query = torch.full((tokens, heads, D), float("nan"), device="cuda", dtype=torch.bfloat16)
        arguments = (qkv, positions, slots, table, cache[:, 1])
        if results is found:
            chunk_rope_and_write(*arguments, query)
        else:
            rope_and_write(*arguments, heads, query)
        results += [query, cache]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-3
