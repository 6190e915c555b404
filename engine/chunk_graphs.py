"""Chunks of prompts as graphs: per padded number of tokens one graph for each layer group; inputs in fixed
memory.

A chunk of a thousand tokens takes the host longer to issue, launch after launch, than the device to compute.
Replayed it takes one copy of inputs and a launch for each layer group, between which the pages of the group
just issued can be shipped.

Tokens behind the chunk's own are padding: ``query_start`` ends before them, so that they are no sequence's,
and their slots are -1. They read no page and write none; what is computed for them is thrown away.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.decode_graphs import OverRanks
from antiphon.engine.device_runtime import DeviceRuntime
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.settings import EngineSettings
from antiphon.engine.step_memory import HostMemory
from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch, LanguageModel, ReservesBuffers

_TOKEN, _POSITION, _FULL_SLOT, _SLIDING_SLOT = range(4)
"""Rows of a chunk's vectors."""
_NARROW_HEADER = 4
"""32-bit numbers before the page tables: where the sequence starts and ends, its length, and one unused."""
_ALIGNMENT = 16
"""In words: vectors begin where vector loads may."""


class ChunkInputs:
    """Views of one buffer of eight-byte words that holds what a chunk reads; its beginning for a small one.

    Args:
        words: [``size(max_tokens, table_pages)``] int64.
        table_pages: P, logical pages of the longest sequence.

    Attributes:
        query_start: [2] int32: 0 and the chunk's tokens. length: [1] int32, keys of the sequence, those of
            this chunk included.
        tables: [2, P] int32, pages of full and sliding layers.
    """

    def __init__(self, words: Tensor, table_pages: int) -> None:
        self.words = words
        narrow = words.view(torch.int32)
        self.query_start = narrow[:2]
        self.length = narrow[2:3]
        self.tables = narrow[_NARROW_HEADER : _NARROW_HEADER + 2 * table_pages].view(2, table_pages)
        self._head = self.size(0, table_pages)

    @staticmethod
    def size(tokens: int, table_pages: int) -> int:
        """Words that a chunk padded to so many tokens takes."""
        head = _NARROW_HEADER // 2 + table_pages
        return -(-head // _ALIGNMENT) * _ALIGNMENT + 4 * tokens

    def used(self, tokens: int) -> Tensor:
        """The words of a chunk padded to so many tokens."""
        return self.words[: self._head + 4 * tokens]

    def vectors(self, tokens: int) -> Tensor:
        """[4, tokens] int64: token ids, positions, slots in full and in sliding layers."""
        return self.words[self._head : self._head + 4 * tokens].view(4, tokens)


class ChunkGraphs:
    """Captured chunks of one model over one KV cache; all are captured here, none later.

    Args:
        model: its forward must not wait for the host, nor choose by what the device computed.
        settings: ``chunk_graph_tokens`` are the padded sizes, at least one.
    """

    def __init__(
        self, model: LanguageModel, kv_cache: PagedKvCache, runtime: DeviceRuntime, settings: EngineSettings
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self._offsets = np.arange(kv_cache.page_size)
        self._pages = table_pages(settings)
        self._sizes = settings.chunk_graph_tokens
        words = torch.zeros(input_words(settings), dtype=torch.int64, device=runtime.device)
        self._inputs = ChunkInputs(words, self._pages)
        # One token of a sequence of one, which is nowhere stored: what the captures compute with.
        self._inputs.query_start[1:].fill_(1)
        self._inputs.length.fill_(1)
        *self._cuts, _ = kv_cache.last_layers(settings.layer_groups)
        if isinstance(model, ReservesBuffers):
            model.reserve(self._sizes[-1])
        # Largest first: the smaller ones find room in what the largest needs.
        self._graphs = {}
        for size in reversed(self._sizes):
            self._inputs.vectors(size)[_FULL_SLOT:].fill_(-1)
            self._inputs.vectors(size)[:_FULL_SLOT].zero_()
            captured = runtime.capture_parts(partial(self._forward, size))
            if isinstance(model, OverRanks):
                captured = model.parts_for_all_ranks(captured)
            self._graphs[size] = captured

    @property
    def largest(self) -> int:
        """Tokens of the longest chunk that is replayed."""
        return self._sizes[-1]

    def prepare(
        self, item: Work, host: HostMemory, on_layer_group: Callable[[int], None] | None
    ) -> Callable[[], Tensor]:
        """Write the inputs of a step that is one chunk of at most ``largest`` tokens, all known.

        Returns:
            What issues the step; it returns the hidden state [1, H] of the chunk's last token, until the next
            chunk overwrites it.
        """
        size = self._sizes[bisect_left(self._sizes, item.count)]
        inputs = ChunkInputs(host.chunk, self._pages)
        self._write(inputs, item, size)
        graphs, source, target = self._graphs[size], inputs.used(size), self._inputs.used(size)
        after_part = _ignore if on_layer_group is None else on_layer_group

        def issue() -> Tensor:
            target.copy_(source, non_blocking=True)
            graphs.replay(after_part)
            return graphs.output

        return issue

    def _write(self, inputs: ChunkInputs, item: Work, size: int) -> None:
        count, page_size, held = item.count, self._page_size, item.sequence.pages
        inputs.query_start.numpy()[:] = (0, count)
        inputs.length.numpy()[:] = item.end
        tables, vectors = inputs.tables.numpy(), inputs.vectors(size).numpy()
        logical_pages = -(-item.end // page_size)
        full = held.full[:logical_pages]
        sliding = held.sliding[: max(0, logical_pages - held.sliding_first)]
        tables[0, : len(full)] = full
        tables[1, held.sliding_first : held.sliding_first + len(sliding)] = sliding
        vectors[:_FULL_SLOT, count:] = 0
        vectors[_FULL_SLOT:, count:] = -1
        vectors[_TOKEN, :count] = item.sequence.token_ids[item.start : item.end]
        vectors[_POSITION, :count] = np.arange(item.start, item.end)
        first_page = item.start // page_size
        before = item.start - first_page * page_size
        # [2, pages, page_size]: page by page, which spares a division of every position.
        slots = tables[:, first_page:logical_pages, None].astype(np.int64) * page_size + self._offsets
        vectors[_FULL_SLOT:, :count] = slots.reshape(2, -1)[:, before : before + count]

    def batch(self, size: int) -> ForwardBatch:
        """What the graphs of a padded size read, in the memory in which they read it."""
        inputs, vectors = self._inputs, self._inputs.vectors(size)
        full, sliding = (
            PagedSequences(inputs.tables[group : group + 1], inputs.query_start, inputs.length, vectors[slot])
            for group, slot in enumerate((_FULL_SLOT, _SLIDING_SLOT))
        )
        return ForwardBatch(vectors[_TOKEN], vectors[_POSITION], full, sliding)

    def _forward(self, size: int, cut: Callable[[], None]) -> Tensor:
        def after_layer(layer: int) -> None:
            if layer in self._cuts:
                cut()

        hidden = self._model.forward(self.batch(size), self._kv_cache, after_layer)
        return hidden.index_select(0, self._inputs.query_start[1:] - 1)


def table_pages(settings: EngineSettings) -> int:
    """Width of a page table."""
    return -(-settings.max_sequence_tokens // settings.page_size_tokens)


def input_words(settings: EngineSettings) -> int:
    """Words that the inputs of the largest captured chunk take; 0 when none is captured."""
    if not settings.chunk_graph_tokens:
        return 0
    return ChunkInputs.size(settings.chunk_graph_tokens[-1], table_pages(settings))


def _ignore(part: int) -> None:
    """Nobody waits for a layer group."""
