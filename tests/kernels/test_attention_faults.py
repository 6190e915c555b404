"""Faults of attention kernels that others met in public, each as a test: sinks lost or counted twice, windows
that are right at some offsets only, tiles skipped, rows read that nobody wrote. In Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.reference import PagedSequences

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones"
)

Q, G, D, S, WINDOW = 8, 1, 16, 64, 128
SCALE = 0.25


class Paged:
    """Sequences in shuffled pages: what they hold, and the same with NaN wherever nothing was written."""

    def __init__(self, lengths: list[int], queries: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        each = -(-max(lengths) // S)
        total = len(lengths) * each + 1
        table = torch.randperm(total, generator=generator)[: total - 1].view(len(lengths), each)
        self.clean = torch.randn(total, G, 2, S, D, generator=generator)
        self.poisoned = torch.full_like(self.clean, float("nan"))
        for row, length in enumerate(lengths):
            for page in range(-(-length // S)):
                written = min(S, length - page * S)
                at = int(table[row, page])
                self.poisoned[at, :, :, :written] = self.clean[at, :, :, :written]
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        tokens = int(starts[-1])
        self.query = torch.randn(tokens, Q, D, generator=generator)
        self.sinks = torch.randn(Q, generator=generator)
        self.sequences = PagedSequences(
            table.int(),
            starts,
            torch.tensor(lengths, dtype=torch.int32),
            torch.zeros(tokens, dtype=torch.int64),
        )

    def expected(self, window: int | None, sinks: Tensor | None = None) -> Tensor:
        sinks = self.sinks if sinks is None else sinks
        return reference.paged_attention(self.query, self.clean, self.sequences, sinks, window, SCALE)

    def decode(self, window: int | None, splits: int = 1, sinks: Tensor | None = None) -> Tensor:
        kernel = DecodeAttention(len(self.query), Q, G, D, self.query.device, splits=splits)
        out = torch.full_like(self.query, float("nan"))
        sinks = self.sinks if sinks is None else sinks
        if window is None:
            return kernel.full(self.query, self.poisoned, self.sequences, sinks, SCALE, out)
        return kernel.sliding(self.query, self.poisoned, self.sequences, sinks, window, SCALE, out)


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_window_is_right_at_every_offset_in_its_pages() -> None:
    lengths = [1, WINDOW // 2, *range(WINDOW - 1, WINDOW + S + 2)]
    paged = Paged(lengths, [1] * len(lengths))
    close(paged.decode(WINDOW), paged.expected(WINDOW))


@pytest.mark.parametrize("splits", [1, 3])
def test_all_keys_are_seen_at_every_length(splits: int) -> None:
    lengths = [1, 2, 15, 16, 17, S - 1, S, S + 1, 2 * S, 5 * S - 1, 5 * S, 5 * S + 1]
    paged = Paged(lengths, [1] * len(lengths), seed=1)
    close(paged.decode(None, splits), paged.expected(None))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_chunk_may_begin_at_every_offset(window: int | None) -> None:
    starts = [*range(WINDOW - 2, WINDOW + S + 2, 9), WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + S]
    paged = Paged([start + 9 for start in starts], [9] * len(starts), seed=2)
    out = torch.full_like(paged.query, float("nan"))
    prefill_attention(*(paged.query, paged.poisoned, paged.sequences, paged.sinks, window, SCALE, 9), out=out)
    close(out, paged.expected(window))


@pytest.mark.parametrize("splits", [1, 5])
def test_sinks_of_any_size_count_once(splits: int) -> None:
    paged = Paged([200, 3], [1, 1], seed=3)
    without = paged.expected(None, torch.full((Q,), -1e4))
    close(paged.decode(None, splits, torch.full((Q,), -1e4)), without)
    assert float(paged.decode(None, splits, torch.full((Q,), 60.0)).abs().max()) < 1e-6
    # A sink that weighs as much as all keys together halves the output; counted twice it would leave a third.
    keys = paged.clean[int(paged.sequences.block_table[1, 0]), 0, 0, :3]
    even = torch.logsumexp(torch.einsum("hd,kd->hk", paged.query[1], keys) * SCALE, -1)
    close(paged.decode(None, splits, even)[1], without[1] / 2)


def test_sinks_are_asked_for() -> None:
    paged = Paged([200], [1])
    for sinks in (torch.zeros(0), torch.zeros(Q - 1), torch.zeros(Q, 1)):
        for window in (None, WINDOW):
            with pytest.raises(ValueError, match="one a query head: 8"):
                paged.decode(window, sinks=sinks)
        with pytest.raises(ValueError, match="one a query head: 8"):
            prefill_attention(paged.query, paged.clean, paged.sequences, sinks, None, SCALE, 1)
