"""What one step computes, as plain work items and as the tensors a model takes.

Shape letters, the same in every docstring of the engine:

    T  tokens of the step               B  sequences of the step        M  rows that are sampled
    P  logical pages of a block table   S  positions per page           N  pages of a group
    G  kv heads of this rank            D  head dim                     H  hidden size
    V  vocabulary                       C  candidates of one row
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from antiphon.engine.sequence import Sequence
from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch


@dataclass(slots=True, eq=False)  # not frozen: hundreds are made per step, and freezing triples their cost
class Work:
    """Positions ``start : start + count`` of one sequence, to be computed in one step.

    ``chunk`` is set for PREFILL_ONLY; its ``count`` is 0 when the whole prompt was cached.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """The last position's logits choose the next token."""
    chunk: int | None = None
    last_chunk: bool = False

    @property
    def end(self) -> int:
        """Positions of the sequence that hold KV after this work."""
        return self.start + self.count


def build_forward_batch(work: Many[Work], page_size: int, device: torch.device) -> ForwardBatch:
    """The tensors of one step; every item has ``count >= 1`` and pages up to its ``end``.

    Returns:
        A ForwardBatch of T = sum of counts tokens and B = len(work) sequences in the order of ``work``.
    """
    return build_host_batch(work, page_size).to(device)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A ForwardBatch in host memory, shapes and dtypes as there; tables and slots are (full, sliding)."""

    tokens: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    lengths: np.ndarray
    tables: tuple[np.ndarray, np.ndarray]
    slots: tuple[np.ndarray, np.ndarray]

    @property
    def decodes(self) -> int:
        """How many sequences at the front have one token; a step's plan puts those there."""
        counts = np.diff(self.query_start)
        return int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)

    def to(self, device: torch.device) -> ForwardBatch:
        """Issue its copy to the device, which does not wait for work under way there."""

        def send(array: np.ndarray) -> torch.Tensor:
            source = torch.from_numpy(array)
            if device.type == "cuda":
                source = source.pin_memory()  # torch keeps such memory until its copy is over
            return source.to(device, non_blocking=True)

        starts, lengths = send(self.query_start), send(self.lengths)
        decodes = self.decodes
        both = 0 < decodes < len(self.lengths)
        chunk_start = send(self.query_start[decodes:] - np.int32(decodes)) if both else None
        full, sliding = (
            PagedSequences(send(table), starts, lengths, send(slot), decodes, chunk_start)
            for table, slot in zip(self.tables, self.slots, strict=True)
        )
        return ForwardBatch(send(self.tokens), send(self.positions), full, sliding)


def build_host_batch(work: Many[Work], page_size: int) -> HostBatch:
    """As ``build_forward_batch``, on the host; a token that is not known yet is 0."""
    counts = np.array([item.count for item in work], dtype=np.int32)
    ends = np.array([item.end for item in work], dtype=np.int32)
    query_start = np.zeros(len(work) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    tokens = np.empty(int(query_start[-1]), dtype=np.int64)
    positions = np.empty_like(tokens)
    logical_pages = -(-int(ends.max()) // page_size)
    tables = {group: np.zeros((len(work), logical_pages), dtype=np.int32) for group in ("full", "sliding")}
    slots = {group: np.empty_like(tokens) for group in ("full", "sliding")}
    for row, item in enumerate(work):
        here = slice(query_start[row], query_start[row + 1])
        tokens[here] = item.sequence.token_ids[item.start : item.end] or 0
        positions[here] = np.arange(item.start, item.end)
        table = item.sequence.pages
        full = tables["full"][row]
        full[: len(table.full)] = table.full[:logical_pages]
        sliding = tables["sliding"][row]
        held = table.sliding[: logical_pages - table.sliding_first]
        sliding[table.sliding_first : table.sliding_first + len(held)] = held
        page, offset = np.divmod(positions[here], page_size)
        slots["full"][here] = full[page].astype(np.int64) * page_size + offset
        slots["sliding"][here] = sliding[page].astype(np.int64) * page_size + offset

    return HostBatch(
        tokens,
        positions,
        query_start,
        ends,
        (tables["full"], tables["sliding"]),
        (slots["full"], slots["sliding"]),
    )
