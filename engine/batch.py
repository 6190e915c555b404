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
        tokens[here] = item.sequence.token_ids[item.start : item.end]
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

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    starts, lengths = on_device(query_start), on_device(ends)
    full_pages, sliding_pages = (
        PagedSequences(on_device(tables[group]), starts, lengths, on_device(slots[group]))
        for group in ("full", "sliding")
    )
    return ForwardBatch(on_device(tokens), on_device(positions), full_pages, sliding_pages)
