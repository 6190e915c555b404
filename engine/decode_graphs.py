"""Decode steps as graphs: per padded batch size one of the forward pass, and one of logits and sampling for
each simple way to sample; inputs in fixed memory.

Block tables stay on the device; a row is written whole when it gets another page table, and afterwards only
where its table grew. What a row holds behind its sequence's length or before its window is never read, so
pages that a sequence left, or that an ended one had, may stay in it. Padding rows have length 0 and slot -1:
they read no page and write none.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.device_choice import Way, Wishes, choose_uniform
from antiphon.engine.device_runtime import Captured, CapturedParts, DeviceRuntime
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.sequence import PageTable
from antiphon.engine.step_memory import (
    FULL_SLOT,
    POSITION,
    SLIDING_SLOT,
    SOURCE,
    TOKEN,
    HostMemory,
    StepMemory,
)
from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch, LanguageModel, ReservesBuffers


def padded_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: every one up to 8, then steps of 4, 8 and 16; the largest is included."""
    sizes = [*range(1, 9), 12, 16, *range(24, 65, 8), *range(80, max_batch_size + 16, 16)]
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


@runtime_checkable
class OverRanks(Protocol):
    """A model whose calls set several ranks to work; see ``model.parallel.leader``."""

    def for_all_ranks(self, captured: Captured) -> Captured:
        """What replays a graph on every rank, given the one that was just captured here."""

    def parts_for_all_ranks(self, captured: CapturedParts) -> CapturedParts:
        """The same for a step that was captured in parts."""


class DecodeGraphs:
    """Captured forward passes of one model over one KV cache; all are captured here, none later.

    Args:
        model: its forward must not wait for the host when every sequence has one token.
        memory: where a step's vectors lie on the device.
        max_sequence_tokens: bounds the width of a block table.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: PagedKvCache,
        runtime: DeviceRuntime,
        memory: StepMemory,
        max_sequence_tokens: int,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._memory = memory
        self._page_size = kv_cache.page_size
        rows, pages = memory.max_batch_size, table_pages(max_sequence_tokens, kv_cache.page_size)
        self._tables = torch.zeros(2, rows, pages, dtype=torch.int32, device=runtime.device)
        self._mirror = np.zeros((2, rows, pages), dtype=np.int64)
        """The block tables as they will be once every update is carried out."""
        self._written: list[tuple[PageTable, int, int] | None] = [None] * rows
        """By row: the table that it shows, and up to which full and sliding logical page."""
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=runtime.device)
        if isinstance(model, ReservesBuffers):
            model.reserve(padded_sizes(rows)[-1])
        self._graphs: dict[int, Captured] = {
            size: self._capture(runtime, partial(self._forward, size))
            for size in reversed(padded_sizes(rows))
        }
        self._tails: dict[tuple[int, Way], Captured] = {
            (size, way): self._capture(runtime, partial(self._sample, size, way))
            for size in self._graphs
            for way in (Way.GREEDY, Way.BY_ID)
        }
        self._size_for = [min(size for size in self._graphs if size >= count) for count in range(rows + 1)]

    def _capture(self, runtime: DeviceRuntime, compute: Callable[[], Tensor]) -> Captured:
        """Of a model over several ranks, a graph that all of them replay."""
        captured = runtime.capture(compute)
        return self._model.for_all_ranks(captured) if isinstance(self._model, OverRanks) else captured

    def tail(self, count: int, wishes: Wishes) -> Captured | None:
        """Logits and choice of a step of ``count`` sequences, when every row is sampled in one simple way;
        its output holds a result of ``device_choice.choose`` for each row, and padding."""
        way = wishes.uniform_way
        return None if way is None else self._tails[self._size_for[count], way]

    def prepare(
        self, work: Many[Work], rows: np.ndarray, sources: np.ndarray, host: HostMemory
    ) -> Callable[[], Tensor]:
        """Write a step's inputs, which whoever issues the step sends first.

        Args:
            work: one token to compute and to sample each. rows: [B] the row of each item.
            sources: [B] for each item the row whose last sampled token it takes; -1 when it is known.

        Returns:
            What issues the step; it returns hidden states [B, H] by row, until the next step overwrites them.
        """
        count = len(work)
        size = self._size_for[count]
        places, pages = self._table_updates(work, rows)
        changed = len(places)
        self._write_vectors(work, rows, sources, host, size)
        sent = host.updates[: changed + (changed + 1) // 2]
        if changed:
            words = sent.numpy()
            words[:changed] = places
            words[changed:].view(np.int32)[:changed] = pages
        graph = self._graphs[size]

        def issue() -> Tensor:
            if changed:
                updates = sent.to(self._tables.device, non_blocking=True)
                new_pages = updates[changed:].view(torch.int32)[:changed]
                self._tables.view(-1).scatter_(0, updates[:changed], new_pages)
            graph.replay()
            return graph.output[:count]

        return issue

    def _write_vectors(
        self, work: Many[Work], rows: np.ndarray, sources: np.ndarray, host: HostMemory, size: int
    ) -> None:
        vectors, lengths = host.vectors.numpy(), host.lengths.numpy()
        count, limit = len(work), self._memory.max_batch_size
        vectors[:, count:size] = np.array([[0], [limit], [0], [-1], [-1]])
        lengths[count:size] = 0
        starts = np.array([item.start for item in work])
        vectors[SOURCE, rows] = np.where(sources >= 0, sources, limit + rows)
        for index in np.flatnonzero(sources < 0).tolist():
            vectors[TOKEN, rows[index]] = work[index].sequence.token_ids[work[index].start]
        vectors[POSITION, rows] = starts
        logical, offset = np.divmod(starts, self._page_size)
        for group, slot in enumerate((FULL_SLOT, SLIDING_SLOT)):
            vectors[slot, rows] = self._mirror[group, rows, logical] * self._page_size + offset
        lengths[rows] = starts + 1

    def _table_updates(self, work: Many[Work], rows: np.ndarray) -> tuple[list[int], list[int]]:
        """Places in the flat block tables and what to write there; brings the mirror up to date."""
        places: list[int] = []
        pages: list[int] = []
        width = self._mirror.shape[2]
        group_size = self._mirror.shape[1] * width
        for item, row in zip(work, rows.tolist(), strict=True):
            table, seen = item.sequence.pages, self._written[row]
            full_end, sliding_end = len(table.full), table.sliding_first + len(table.sliding)
            if seen is not None and seen[0] is table:
                if seen[1] == full_end and seen[2] == sliding_end:
                    continue
                full_from, sliding_from = seen[1], max(seen[2], table.sliding_first)
            else:
                full_from, sliding_from = 0, table.sliding_first
            self._written[row] = (table, full_end, sliding_end)
            new_sliding = table.sliding[sliding_from - table.sliding_first :]
            self._mirror[0, row, full_from:full_end] = table.full[full_from:]
            self._mirror[1, row, sliding_from:sliding_end] = new_sliding
            places += range(row * width + full_from, row * width + full_end)
            places += range(group_size + row * width + sliding_from, group_size + row * width + sliding_end)
            pages += table.full[full_from:]
            pages += new_sliding
        return places, pages

    def _forward(self, size: int) -> Tensor:
        memory = self._memory
        starts, lengths = self._query_start[: size + 1], memory.lengths[:size]
        full, sliding = (
            PagedSequences(self._tables[group, :size], starts, lengths, memory.row(slot)[:size])
            for group, slot in enumerate((FULL_SLOT, SLIDING_SLOT))
        )
        tokens = memory.token_pool.index_select(0, memory.row(SOURCE)[:size])
        return self._model.forward(
            ForwardBatch(tokens, memory.row(POSITION)[:size], full, sliding), self._kv_cache
        )

    def _sample(self, size: int, way: Way) -> Tensor:
        return choose_uniform(self._memory, self._model, self._graphs[size].output, way)


def table_pages(max_sequence_tokens: int, page_size: int) -> int:
    """Width of a block table."""
    return -(-max_sequence_tokens // page_size)
