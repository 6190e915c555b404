"""Attention of steps in which some sequences decode and others bring chunks: each kind by its own kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.engine.batch import HostBatch
from antiphon.kernels import reference
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences
from antiphon.model.cuda_paged_attention import PagedAttention
from antiphon.model.parallel.batch_wire import BatchSizes, pack, unpack

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
pytestmark = [pytest.mark.gpu] if CUDA else []  # in the interpreter otherwise
PAGE, HEADS, KV_HEADS, DIM = (64, 64, 8, 64) if CUDA else (16, 8, 2, 16)
WINDOW = 128 if CUDA else 16
"""The model's own on a GPU, where the kernel of chunks takes none that is shorter than a page."""


def mixed(lengths: list[int], counts: list[int]) -> tuple[PagedSequences, int]:
    """Sequences in shuffled pages, with as many queries each; how many pages there are."""
    pages = -(-max(lengths) // PAGE)
    table = torch.randperm(pages * len(lengths) + 1)[: pages * len(lengths)].view(len(lengths), pages)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    decodes = counts.index(next(count for count in counts if count > 1))
    return PagedSequences(
        table.int().to(DEVICE),
        starts.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.zeros(sum(counts), dtype=torch.int64, device=DEVICE),
        decodes,
        (starts[decodes:] - decodes).to(DEVICE),
    ), pages * len(lengths) + 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    ("sixteenths", "counts"), [([5, 40, 20], [1, 1, 7]), ([33, 17, 30], [1, 17, 3])], ids=["two", "one"]
)
def test_each_kind_of_sequence_sees_its_own_keys(
    sixteenths: list[int], counts: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are given in sixteenths of a window, so that most sequences are longer than one."""
    lengths = [each * WINDOW // 16 for each in sixteenths]
    torch.manual_seed(len(counts) + lengths[0])
    sequences, pages = mixed(lengths, counts)
    layer = torch.randn(pages, KV_HEADS, 2, PAGE, DIM, device=DEVICE, dtype=DTYPE)
    query = torch.randn(sum(counts), HEADS, DIM, device=DEVICE, dtype=DTYPE)
    sinks = torch.randn(HEADS, device=DEVICE)
    expected = reference.paged_attention(query.float(), layer.float(), sequences, sinks, window, DIM**-0.5)
    attention = PagedAttention(HEADS, KV_HEADS, DIM, DEVICE, hopper=CUDA)
    seen: list[int] = []
    chunks = attention._chunks

    def noting(query: Tensor, *others: object) -> Tensor:
        seen.append(query.shape[0])
        return chunks(query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_chunks", noting)
    got = attention(query, layer, sequences, sinks, window)
    assert seen == [sum(counts) - sequences.decodes]
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_kind_reads_fp8_pages_by_its_own_kernel() -> None:
    """The decoding sequences' as they are, the chunks' widened; pages of nobody are NaN."""
    torch.manual_seed(5)
    lengths, counts = [5, 40, 20], [1, 1, 7]
    sequences, pages = mixed(lengths, counts)
    data = torch.full((pages, KV_HEADS, head_bytes(PAGE, DIM)), 255, dtype=torch.uint8, device=DEVICE)
    layer = Fp8Pages(data, PAGE, DIM)
    for row, length in enumerate(lengths):
        position = torch.arange(length, device=DEVICE)
        slot = sequences.block_table[row, position // PAGE].long() * PAGE + position % PAGE
        keys, values = torch.randn(2, length, KV_HEADS, DIM, device=DEVICE)
        reference.write_kv(keys, values, layer, slot)
    query = torch.randn(sum(counts), HEADS, DIM, device=DEVICE, dtype=DTYPE)
    sinks = torch.randn(HEADS, device=DEVICE)
    expected = reference.paged_attention(query.float(), layer, sequences, sinks, None, DIM**-0.5)
    got = PagedAttention(HEADS, KV_HEADS, DIM, DEVICE, hopper=CUDA)(query, layer, sequences, sinks, None)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


def test_what_is_known_of_a_step_travels_to_other_ranks() -> None:
    starts = torch.tensor([0, 1, 2, 9], dtype=torch.int32).numpy()
    vector, lengths = torch.arange(9).numpy(), torch.tensor([5, 6, 9], dtype=torch.int32).numpy()
    table = torch.zeros(3, 1, dtype=torch.int32).numpy()
    batch = HostBatch(vector, vector, starts, lengths, (table, table), (vector, vector)).to(DEVICE)
    assert batch.full.decodes == 2
    arrived = unpack(pack(batch), BatchSizes.of(batch))
    for sequences in (batch.full, batch.sliding, arrived.full, arrived.sliding):
        parts = sequences.parts()
        assert parts is not None
        assert parts[0].query_start.tolist() == [0, 1, 2]
        assert parts[1].query_start.tolist() == [0, 7]
        assert parts[1].kv_len.tolist() == [9]
    assert replace(batch.full, decodes=0).parts() is None


def test_of_one_kind_of_sequences_nothing_more_is_copied() -> None:
    starts = torch.tensor([0, 1, 2], dtype=torch.int32).numpy()
    vector, table = torch.arange(2).numpy(), torch.zeros(2, 1, dtype=torch.int32).numpy()
    batch = HostBatch(vector, vector, starts, starts[1:], (table, table), (vector, vector)).to(DEVICE)
    arrived = unpack(pack(batch), BatchSizes.of(batch))
    for sequences in (batch.full, arrived.sliding):
        assert sequences.decodes == 2
        assert sequences.chunk_start is None
        assert sequences.parts() is None


@pytest.mark.parametrize(("starts", "decodes"), [([0, 1, 2], 2), ([0, 3, 4], 0), ([0, 1, 4], 1)])
def test_decoding_sequences_are_counted_from_the_front(starts: list[int], decodes: int) -> None:
    vector = torch.arange(starts[-1]).numpy()
    begin, table = (
        torch.tensor(starts, dtype=torch.int32).numpy(),
        torch.zeros(2, 1, dtype=torch.int32).numpy(),
    )
    batch = HostBatch(vector, vector, begin, begin[1:], (table, table), (vector, vector))
    assert batch.decodes == decodes
