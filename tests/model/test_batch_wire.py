"""A step's batch as it travels between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.batch_wire import BatchSizes, pack, unpack


def random_batch(tokens: int, sequences: int, full_pages: int, sliding_pages: int) -> ForwardBatch:
    def group(pages: int) -> PagedSequences:
        short = {"dtype": torch.int32}
        return PagedSequences(
            torch.randint(-1, 99, (sequences, pages), **short),  # type: ignore[call-overload]
            torch.randint(0, 99, (sequences + 1,), **short),  # type: ignore[call-overload]
            torch.randint(0, 99, (sequences,), **short),  # type: ignore[call-overload]
            torch.randint(-1, 10**12, (tokens,)),
        )

    ids = torch.randint(0, 10**6, (2, tokens))
    return ForwardBatch(ids[0], ids[1], group(full_pages), group(sliding_pages))


def tensors_of(batch: ForwardBatch) -> list[Tensor]:
    groups = (batch.full, batch.sliding)
    fields = ("block_table", "query_start", "kv_len", "slot")
    return [batch.token_ids, batch.positions, *(getattr(g, name) for g in groups for name in fields)]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 3, 5, 2), (513, 9, 0, 33), (4, 4, 17, 17)])
def test_a_batch_arrives_as_it_was_sent(sizes: tuple[int, int, int, int]) -> None:
    batch = random_batch(*sizes)
    found = BatchSizes.of(batch)
    assert found == BatchSizes(*sizes)
    buffer = pack(batch)
    assert buffer.shape == (found.total_bytes,)
    for sent, arrived in zip(tensors_of(batch), tensors_of(unpack(buffer, found)), strict=True):
        assert sent.dtype == arrived.dtype
        assert torch.equal(sent, arrived)


def test_a_batch_of_another_dtype_is_not_sent_as_something_else() -> None:
    batch = random_batch(3, 2, 1, 1)
    with pytest.raises(ValueError, match=r"torch\.int32 \[3\], not torch\.int64 \[3\]"):
        pack(replace(batch, positions=batch.positions.int()))
