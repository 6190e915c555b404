"""Paged attention in plain torch against dense attention written out per query."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import PagedSequences, paged_attention, write_kv

Q, G, D, PAGE = 6, 2, 16, 8
SCALE = D**-0.5


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """The last ``len(query)`` positions of one sequence, one query and one head at a time, in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i in range(len(query)):
        position = len(key) - len(query) + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(Q):
            group = head // (Q // G)
            scores = key[first : position + 1, group].double() @ query[i, head].double() * SCALE
            weights = scores.exp() / (scores.exp().sum() + sinks[head].double().exp())
            out[i, head] = weights @ value[first : position + 1, group].double()
    return out


class Batch:
    """Sequences of given (keys, queries) with pages dealt in a random order from one cache."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int = 0) -> None:
        pages = [-(-kv // PAGE) for kv, _ in lengths]
        order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed))
        self.cache = randn(len(order), G, 2, PAGE, D, seed=seed + 1)  # stale values everywhere
        self.key = [randn(kv, G, D, seed=seed + 10 + b) for b, (kv, _) in enumerate(lengths)]
        self.value = [randn(kv, G, D, seed=seed + 50 + b) for b, (kv, _) in enumerate(lengths)]
        self.query = [randn(count, Q, D, seed=seed + 90 + b) for b, (_, count) in enumerate(lengths)]
        table = torch.full((len(lengths), max(pages)), 10**6, dtype=torch.int32)  # unused entries: anything
        slots, used = [], 0
        for b, (kv, _) in enumerate(lengths):
            table[b, : pages[b]] = order[used : used + pages[b]].int()
            used += pages[b]
            positions = torch.arange(kv)
            slots.append(table[b, positions // PAGE].long() * PAGE + positions % PAGE)
        write_kv(torch.cat(self.key), torch.cat(self.value), self.cache, torch.cat(slots))
        starts = torch.tensor([0, *(count for _, count in lengths)]).cumsum(0)
        self.sequences = PagedSequences(
            table, starts.int(), torch.tensor([kv for kv, _ in lengths], dtype=torch.int32), torch.empty(0)
        )

    def attend(self, sinks: Tensor, window: int | None) -> Tensor:
        return paged_attention(torch.cat(self.query), self.cache, self.sequences, sinks, window, SCALE)

    def expected(self, sinks: Tensor, window: int | None) -> Tensor:
        rows = zip(self.query, self.key, self.value, strict=True)
        return torch.cat([dense(q, k, v, sinks, window) for q, k, v in rows]).float()


@pytest.mark.parametrize("window", [None, 1, 5, 8, 9])
def test_equals_dense_attention(window: int | None) -> None:
    batch = Batch([(1, 1), (20, 20), (17, 1), (33, 6), (8, 0), (16, 16)])
    sinks = randn(Q, seed=5)
    torch.testing.assert_close(batch.attend(sinks, window), batch.expected(sinks, window), atol=2e-6, rtol=0)


@pytest.mark.parametrize("queries", [1, 3], ids=["decode", "prefill"])
def test_window_is_exactly_128_keys(queries: int) -> None:
    keys = 300
    batch = Batch([(keys, queries)])
    sinks = randn(Q, seed=5)
    before = batch.attend(sinks, 128)[-1]

    def after_change(distance: int) -> Tensor:
        position = keys - 1 - distance
        page, offset = batch.sequences.block_table[0, position // PAGE], position % PAGE
        saved = batch.cache[page, :, 1, offset].clone()
        batch.cache[page, :, 1, offset] += 100.0
        result = batch.attend(sinks, 128)[-1]
        batch.cache[page, :, 1, offset] = saved
        return result

    assert torch.equal(after_change(128), before)
    assert not torch.equal(after_change(127), before)
    assert not torch.equal(after_change(0), before)


def test_pages_outside_the_window_may_be_anything() -> None:
    batch = Batch([(100, 2)])
    sinks = randn(Q, seed=5)
    expected = batch.expected(sinks, 20)
    batch.sequences.block_table[0, : (100 - 2 - 19) // PAGE] = -7
    torch.testing.assert_close(batch.attend(sinks, 20), expected, atol=2e-6, rtol=0)


def test_sink_takes_its_share_once_and_unscaled() -> None:
    """With all keys equal, the output is value * n / (n + exp(sink - score))."""
    count, sink = 12, 1.5
    batch = Batch([(count, 1)])
    batch.key = [torch.ones(count, G, D)]
    batch.value = [torch.ones(count, G, D)]
    pages = batch.sequences.block_table[0, torch.arange(count) // PAGE].long()
    write_kv(batch.key[0], batch.value[0], batch.cache, pages * PAGE + torch.arange(count) % PAGE)
    batch.query = [torch.full((1, Q, D), 0.25)]
    score = 0.25 * D * SCALE
    share = count / (count + math.exp(sink - score))
    out = batch.attend(torch.full((Q,), sink), None)
    torch.testing.assert_close(out, torch.full_like(out, share))


def test_padding_rows_are_zero() -> None:
    batch = Batch([(9, 2), (4, 1)])
    query = torch.cat((*batch.query, torch.full((3, Q, D), torch.nan)))
    sinks = randn(Q, seed=5)
    out = paged_attention(query, batch.cache, batch.sequences, sinks, None, SCALE)
    assert torch.equal(out[:3], batch.attend(sinks, None))
    assert torch.equal(out[3:], torch.zeros(3, Q, D))


def test_write_kv_skips_padding_and_touches_nothing_else() -> None:
    cache = torch.zeros(4, G, 2, PAGE, D)
    key, value = torch.full((3, G, D), 2.0), torch.full((3, G, D), 3.0)
    write_kv(key, value, cache, torch.tensor([2 * PAGE + 5, -1, 0]))
    assert torch.equal(cache[2, :, 0, 5], key[0])
    assert torch.equal(cache[2, :, 1, 5], value[0])
    assert torch.equal(cache[0, :, 0, 0], key[2])
    assert cache.count_nonzero() == 2 * 2 * G * D


def test_write_kv_into_a_strided_view() -> None:
    """One layer of a cache whose pages hold several layers."""
    cache = torch.zeros(4, 3, G, 2, PAGE, D)
    key, value = randn(2, G, D, seed=1), randn(2, G, D, seed=2)
    write_kv(key, value, cache[:, 1], torch.tensor([PAGE, 3 * PAGE + 7]))
    assert torch.equal(cache[1, 1, :, 0, 0], key[0])
    assert torch.equal(cache[3, 1, :, 1, 7], value[1])
    assert not cache[:, (0, 2)].any()
