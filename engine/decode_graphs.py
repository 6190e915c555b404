"""Decode steps as CUDA graphs: one capture per padded batch size, inputs in fixed memory.

A step writes its inputs into pinned host memory, copies them over, and replays. Block tables stay on the
device; only rows whose page lists changed since the step before are copied again. The caller synchronises
with the device before the next step, so pinned memory is never overwritten while a copy reads it.

Padding rows read page 0 and write nothing: their slot is -1.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch, LanguageModel

_GROUPS = ("full", "sliding")


def padded_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: every one up to 8, then steps of 4, 8 and 16; the largest is included."""
    sizes = [*range(1, 9), 12, 16, *range(24, 65, 8), *range(80, max_batch_size + 16, 16)]
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


class DecodeGraphs:
    """Captured decode steps of one model over one KV cache.

    Args:
        model: its forward must not synchronise with the host for one token per sequence.
        kv_cache: pages on a CUDA device.
        max_batch_size: largest step.
        max_sequence_tokens: bounds the width of a block table.
    """

    def __init__(
        self, model: LanguageModel, kv_cache: PagedKvCache, max_batch_size: int, max_sequence_tokens: int
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self._sizes = padded_sizes(max_batch_size)
        device = kv_cache.device
        pages = -(-max_sequence_tokens // self._page_size)
        # Rows: token id, position, slot of the full group, slot of the sliding group.
        self._vectors = torch.zeros(4, max_batch_size, dtype=torch.int64, device=device)
        self._lengths = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(2, max_batch_size, pages, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._host_vectors = torch.zeros_like(self._vectors, device="cpu").pin_memory()
        self._host_lengths = torch.ones_like(self._lengths, device="cpu").pin_memory()
        self._host_tables = torch.zeros_like(self._tables, device="cpu").pin_memory()
        self._row_keys: list[tuple[str, int, int, int, int] | None] = [None] * max_batch_size
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # torch names its type only privately

    def capture_all(self) -> None:
        """Capture every padded size, largest first, so that no step pays for it later."""
        for size in reversed(self._sizes):
            self._graph(size)

    def run(self, work: Many[Work]) -> Tensor:
        """Issue one step of ``len(work)`` sequences, each with one token to compute and sample.

        Returns:
            [len(work), V] float32 logits in memory that the next step of the same size overwrites.

        Raises:
            ValueError: a work item is not a single sampled token.
        """
        if any(item.count != 1 or not item.samples for item in work):
            raise ValueError("a decode graph computes exactly one sampled token per sequence")
        count = len(work)
        size = next(size for size in self._sizes if size >= count)
        self._fill(work, size)
        graph, logits = self._graph(size)
        graph.replay()
        return logits[:count]

    def _fill(self, work: Many[Work], size: int) -> None:
        count, page = len(work), self._page_size
        vectors, lengths = self._host_vectors.numpy(), self._host_lengths.numpy()
        vectors[:, count:size] = np.array([[0], [0], [-1], [-1]])
        lengths[count:size] = 1
        for row, item in enumerate(work):
            pages, position = item.sequence.pages, item.start
            logical, offset = divmod(position, page)
            vectors[0, row] = item.sequence.token_ids[position]
            vectors[1, row] = position
            vectors[2, row] = pages.full[logical] * page + offset
            vectors[3, row] = pages.sliding[logical - pages.sliding_first] * page + offset
            lengths[row] = item.end
            self._update_table(row, item)
        self._vectors[:, :size].copy_(self._host_vectors[:, :size], non_blocking=True)
        self._lengths[:size].copy_(self._host_lengths[:size], non_blocking=True)

    def _update_table(self, row: int, item: Work) -> None:
        sequence, pages = item.sequence, item.sequence.pages
        key = (
            sequence.request.request_id,
            sequence.attempt,
            len(pages.full),
            pages.sliding_first,
            len(pages.sliding),
        )
        if self._row_keys[row] == key:
            return
        self._row_keys[row] = key
        host = self._host_tables.numpy()
        first, last = pages.sliding_first, pages.sliding_first + len(pages.sliding)
        host[0, row, : len(pages.full)] = pages.full
        host[1, row, first:last] = pages.sliding
        for group, begin, end in ((0, 0, len(pages.full)), (1, first, last)):
            self._tables[group, row, begin:end].copy_(
                self._host_tables[group, row, begin:end], non_blocking=True
            )

    def _batch(self, size: int) -> ForwardBatch:
        starts, lengths = self._query_start[: size + 1], self._lengths[:size]
        full, sliding = (
            PagedSequences(self._tables[group, :size], starts, lengths, self._vectors[2 + group, :size])
            for group in range(len(_GROUPS))
        )
        return ForwardBatch(self._vectors[0, :size], self._vectors[1, :size], full, sliding)

    def _graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        captured = self._graphs.get(size)
        if captured is None:
            captured = self._graphs[size] = self._capture(size)
        return captured

    @torch.inference_mode()
    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        batch = self._batch(size)
        # The run before the capture compiles kernels and sets up libraries. It must not touch pages in use.
        slots = self._vectors[2:, :size].clone()
        self._vectors[2:, :size] = -1
        stream = torch.cuda.Stream(self._kv_cache.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._model.logits(self._model.forward(batch, self._kv_cache))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model.logits(self._model.forward(batch, self._kv_cache))
        self._pool = graph.pool()
        self._vectors[2:, :size] = slots
        return graph, logits
