"""The Triton attention kernels against the plain op, in Triton's interpreter (float32, small shapes)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention import decode, split_parts
from antiphon.kernels.attention.decode import DecodeAttention, choose_splits
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.reference import PagedSequences

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)

Q, G, D, S = 16, 2, 64, 64
SCALE = 0.125
EDGES = [1, 63, 64, 65, 127, 128, 129, 130, 300]
OF_PAGES = [1, 65, 300]
"""One page, two and five: among many more splits than pages nothing else makes a difference."""


def paged(
    lengths: list[int], queries: list[int], seed: int = 0
) -> tuple[Tensor, PagedSequences, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, pages = len(lengths), max(-(-n // S) for n in lengths)
    cache = torch.randn(batch * pages + 3, 3, G, 2, S, D, generator=generator)
    table = (
        torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].reshape(batch, pages).int()
    )
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    tokens = int(starts[-1])
    query = torch.randn(tokens, Q, D, generator=generator)
    sinks = torch.randn(Q, generator=generator)
    sequences = PagedSequences(
        table, starts, torch.tensor(lengths, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
    )
    return cache[:, 1], sequences, query, sinks


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan"))


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 32, 64])
def test_decode_full_counts_the_sink_once_for_any_split_count(splits: int) -> None:
    lengths = EDGES if splits <= 5 else OF_PAGES
    layer, sequences, query, sinks = paged(lengths, [1] * len(lengths))
    kernel = DecodeAttention(len(lengths), Q, G, D, query.device, splits=splits)
    out = kernel.full(query, layer, sequences, sinks, SCALE, poisoned(query))
    expected = reference.paged_attention(query, layer, sequences, sinks, None, SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_decode_sliding_sees_exactly_the_window() -> None:
    layer, sequences, query, sinks = paged(EDGES, [1] * len(EDGES), seed=1)
    kernel = DecodeAttention(len(EDGES), Q, G, D, query.device)
    out = kernel.sliding(query, layer, sequences, sinks, 128, SCALE, poisoned(query))
    expected = reference.paged_attention(query, layer, sequences, sinks, 128, SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    wider = reference.paged_attention(query, layer, sequences, sinks, 129, SCALE)
    assert not torch.allclose(out[-1], wider[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("lengths", "queries"), [([70], [70]), ([300, 129, 5], [33, 1, 5]), ([130], [2]), ([257], [129])]
)
def test_prefill_continues_a_cached_prefix(
    window: int | None, lengths: list[int], queries: list[int]
) -> None:
    layer, sequences, query, sinks = paged(lengths, queries, seed=2)
    out = prefill_attention(query, layer, sequences, sinks, window, SCALE, max(queries), out=poisoned(query))
    expected = reference.paged_attention(query, layer, sequences, sinks, window, SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_changing_the_sinks_changes_the_output() -> None:
    layer, sequences, query, sinks = paged([200], [1], seed=3)
    kernel = DecodeAttention(1, Q, G, D, query.device)
    one = kernel.full(query, layer, sequences, sinks, SCALE, poisoned(query))
    other = kernel.full(query, layer, sequences, sinks + 3, SCALE, poisoned(query))
    assert not torch.allclose(one, other, rtol=1e-2)


def test_unsupported_shapes_are_refused() -> None:
    layer, sequences, query, sinks = paged([200], [1])
    with pytest.raises(ValueError, match="groups of <= 16"):
        DecodeAttention(1, 34, 2, D, query.device)
    with pytest.raises(ValueError, match="expected contiguous"):
        DecodeAttention(2, Q, G, D, query.device).full(query, layer, sequences, sinks, SCALE, query)
    with pytest.raises(ValueError, match="not a power of two"):
        DecodeAttention(1, Q, G, D, query.device).sliding(query, layer, sequences, sinks, 100, SCALE, query)


class Launched:
    """In a kernel's place: keeps what it is launched with."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}

    def __getitem__(self, _: object) -> Launched:
        return self

    def __call__(self, *_: object, **options: object) -> None:
        self.options = options


@pytest.mark.parametrize(
    ("pdl", "ahead", "first", "merge"),
    [(True, True, True, True), (True, False, None, True), (False, True, None, None)],
)
def test_a_full_layer_that_is_not_launched_ahead_still_lets_its_merge_begin_early(
    pdl: bool, ahead: bool, first: bool | None, merge: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, merged = Launched(), Launched()
    monkeypatch.setattr(decode, "_decode_full", full)
    monkeypatch.setattr(split_parts, "_merge_splits", merged)
    layer, sequences, query, sinks = paged(EDGES, [1] * len(EDGES))
    kernel = DecodeAttention(len(EDGES), Q, G, D, query.device, splits=3, pdl=pdl, ahead=ahead)
    kernel.full(query, layer, sequences, sinks, SCALE, query)
    assert (full.options.get("launch_pdl"), merged.options.get("launch_pdl")) == (first, merge)
    assert full.options["PDL"] is pdl, "it must let the merge begin, and may wait for nobody"
    assert bool(full.options["PREFETCHED"]) is ahead, "nothing to fetch meanwhile"


@pytest.mark.parametrize(("batch", "ahead"), [(1, None), (16, None), (17, True)])
def test_up_to_16_sequences_a_full_layer_waits_for_its_projection(
    batch: int, ahead: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to there the launch ahead is the one that streams the projection and leaves SMs one by one."""
    full = Launched()
    monkeypatch.setattr(decode, "_decode_full", full)
    monkeypatch.setattr(split_parts, "_merge_splits", Launched())
    layer, sequences, query, sinks = paged([65] * batch, [1] * batch)
    kernel = DecodeAttention(batch, Q, G, D, query.device, pdl=True)
    kernel.full(query, layer, sequences, sinks, SCALE, query)
    assert full.options.get("launch_pdl") is ahead


def test_splits_fill_the_device_only_while_the_batch_does_not() -> None:
    assert choose_splits(1, 8) == 32
    assert choose_splits(8, 8) == 5
    assert choose_splits(32, 8) == 1
    assert choose_splits(128, 8) == 1


@pytest.mark.parametrize("window", [None, 128])
def test_the_output_of_a_padded_chunk_may_take_the_place_of_its_queries(window: int | None) -> None:
    """Queries behind the chunk's own are padding and stay what they are."""
    layer, sequences, query, sinks = paged([257], [129], seed=4)
    expected = reference.paged_attention(query, layer, sequences, sinks, window, SCALE)
    padded = torch.cat((query, torch.randn(63, *query.shape[1:])))
    before = padded.clone()
    out = prefill_attention(padded, layer, sequences, sinks, window, SCALE, len(padded), out=padded)
    assert out is padded
    torch.testing.assert_close(out[:129], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out[129:], before[129:])
