"""A step's batch as one buffer: sizes travel first, so that the receiver knows what comes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """What a receiver must know to take a batch apart.

    Attributes:
        tokens: T.
        sequences: B.
        full_pages, sliding_pages: columns P of the two block tables.
        decodes: as of ``PagedSequences``.
    """

    tokens: int
    sequences: int
    full_pages: int
    sliding_pages: int
    decodes: int = 0

    @staticmethod
    def of(batch: ForwardBatch) -> BatchSizes:
        """The sizes of a batch."""
        sequences, full_pages = batch.full.block_table.shape
        sliding_pages = batch.sliding.block_table.shape[1]
        decodes = batch.full.decodes
        return BatchSizes(batch.token_ids.shape[0], sequences, full_pages, sliding_pages, decodes)

    def fields(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, 8-byte ones first so that each lies at a multiple of its size."""
        long, short = torch.int64, torch.int32
        vectors = [((self.tokens,), long)] * 4
        tables = [((self.sequences, pages), short) for pages in (self.full_pages, self.sliding_pages)]
        rows = [((self.sequences + 1,), short), ((self.sequences,), short)] * 2
        return [*vectors, *tables, *rows]

    @property
    def total_bytes(self) -> int:
        """Length of the buffer."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.fields())


def pack(batch: ForwardBatch) -> Tensor:
    """[total_bytes] uint8, on the batch's device.

    Raises:
        ValueError: a tensor has another shape or dtype than ``ForwardBatch`` says.
    """
    full, sliding = batch.full, batch.sliding
    tensors = [
        *(batch.token_ids, batch.positions, full.slot, sliding.slot, full.block_table, sliding.block_table),
        *(full.query_start, full.kv_len, sliding.query_start, sliding.kv_len),
    ]
    for tensor, (shape, dtype) in zip(tensors, BatchSizes.of(batch).fields(), strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"a batch holds {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpack(buffer: Tensor, sizes: BatchSizes) -> ForwardBatch:
    """The batch that was packed; its tensors are views of the buffer."""
    tensors = []
    begin = 0
    for shape, dtype in sizes.fields():
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(buffer[begin:end].view(dtype).view(shape))
        begin = end
    token_ids, positions, full_slot, sliding_slot, full_table, sliding_table = tensors[:6]
    full_start, full_len, sliding_start, sliding_len = tensors[6:]
    decodes = sizes.decodes
    chunk_start = full_start[decodes:] - decodes if 0 < decodes < sizes.sequences else None
    return ForwardBatch(
        token_ids,
        positions,
        PagedSequences(full_table, full_start, full_len, full_slot, decodes, chunk_start),
        PagedSequences(sliding_table, sliding_start, sliding_len, sliding_slot, decodes, chunk_start),
    )
