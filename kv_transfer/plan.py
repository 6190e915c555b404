"""Which bytes go where: from a source rank's pages to a destination rank's, for any TP on either side.

A page is [layer of the group, kv head, K|V, token, dim], so a range of layers of one page is one run when
both sides hold the same heads, and one run per layer when they do not. Neighbouring runs are merged, because
links are fast only with descriptors of megabytes. A pure function of plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import FP8_E4M3, KvFingerprint

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a worker of ``tensor_parallel`` ranks."""

    tensor_parallel: int
    rank: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Shape of one page group's pages over all ranks.

    Attributes:
        layers: layers of the group.
        kv_heads: kv heads of the model.
        head_bytes: bytes of one head of one layer of one page (K and V, and in FP8 their scales).
    """

    layers: int
    kv_heads: int
    head_bytes: int

    def heads(self, shard: Shard) -> range:
        """Model heads that a rank holds; with more ranks than heads, several ranks hold the same one.

        Raises:
            HandshakeError: heads and ranks do not divide each other.
        """
        ranks, rank = shard.tensor_parallel, shard.rank
        if self.kv_heads % ranks == 0:
            each = self.kv_heads // ranks
            return range(rank * each, (rank + 1) * each)
        if ranks % self.kv_heads == 0:
            head = rank // (ranks // self.kv_heads)
            return range(head, head + 1)
        raise HandshakeError(f"{self.kv_heads} kv heads cannot be spread over {ranks} ranks")

    def page_bytes(self, shard: Shard) -> int:
        """Bytes of one page on a rank."""
        return self.layers * len(self.heads(shard)) * self.head_bytes

    def sender(self, head: int, source_ranks: int, destination_rank: int) -> int:
        """The source rank that sends a head to a destination rank; replicas take turns."""
        holders = [rank for rank in range(source_ranks) if head in self.heads(Shard(source_ranks, rank))]
        return holders[destination_rank % len(holders)]


def group_layouts(fingerprint: KvFingerprint) -> dict[str, GroupLayout]:
    """Page group -> layout.

    Raises:
        HandshakeError: the fingerprint names a dtype of unknown size.
    """

    def layout(layers: int, kv_dtype: str) -> GroupLayout:
        return GroupLayout(layers, fingerprint.kv_heads, _head_bytes(fingerprint, kv_dtype))

    return {
        "full": layout(fingerprint.full_layers, fingerprint.full_kv_dtype),
        "sliding": layout(fingerprint.sliding_layers, fingerprint.kv_dtype),
    }


def _head_bytes(fingerprint: KvFingerprint, kv_dtype: str) -> int:
    width = fingerprint.head_dim
    size = DTYPE_BYTES.get(kv_dtype)
    if size is not None:
        return 2 * fingerprint.page_size_tokens * width * size
    if kv_dtype == FP8_E4M3:  # a byte for each number, and two for the scale of a token's numbers
        return 2 * fingerprint.page_size_tokens * (width + 2)
    raise HandshakeError(f"unknown KV dtype {kv_dtype!r}")


@dataclass(frozen=True, slots=True)
class PagePart:
    """What one rank sends another of each page: runs of one length.

    Attributes:
        page_bytes: of a page on either side.
        places: [R, 2] int64: where the runs begin in a page on either side.
        length: bytes of each.
        whole_pages: on both sides, so that neighbouring pages may be one run.
    """

    page_bytes: tuple[int, int]
    places: NDArray[np.int64]
    length: int
    whole_pages: bool


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Runs of one part of each of some pages.

    Attributes:
        pairs: [N, 2] int64, dense, of (source page, destination page), as ``pair_array`` makes them.
    """

    pairs: NDArray[np.int64]
    part: PagePart

    def __len__(self) -> int:
        """How many, neighbours counted apart."""
        return len(self.pairs) * len(self.part.places)

    @property
    def total_bytes(self) -> int:
        """Sum of their lengths."""
        return len(self) * self.part.length

    def rows(self) -> NDArray[np.int64]:
        """[M, 3] int64 of (offset at the source, at the destination, length) in bytes, neighbours joined."""
        part, pairs = self.part, self.pairs
        if part.whole_pages:
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        rows = np.empty((len(pairs), len(part.places), 3), dtype=np.int64)
        rows[:, :, :2] = (pairs * np.array(part.page_bytes))[:, None] + part.places
        rows[:, :, 2] = part.length
        flat = rows.reshape(-1, 3)
        return merge_runs(flat) if part.whole_pages else flat


def plan_pages(
    layout: GroupLayout, source: Shard, destination: Shard, pairs: NDArray[np.int64], layers: range
) -> PageRuns | None:
    """What one source rank sends to one destination rank; None if nothing.

    Over all source ranks, every byte of ``layers`` of each destination page is written exactly once.

    Args:
        pairs: as of ``PageRuns``; no destination page twice.
        layers: layers of the group to send, a contiguous range.
    """
    part = _part(layout, source, destination, layers) if layers and len(pairs) else None
    return None if part is None else PageRuns(pairs, part)


def plan_runs(
    layout: GroupLayout,
    source: Shard,
    destination: Shard,
    pages: Sequence[tuple[int, int]],
    layers: range,
) -> NDArray[np.int64]:
    """See ``plan_pages``: its rows of (source page, destination page) pairs, which may be none."""
    runs = plan_pages(layout, source, destination, pair_array(pages), layers)
    return np.empty((0, 3), dtype=np.int64) if runs is None else runs.rows()


def pair_array(pages: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """[N, 2] int64 of pairs."""
    return np.fromiter(chain.from_iterable(pages), np.int64, 2 * len(pages)).reshape(-1, 2)


@lru_cache(maxsize=1024)
def _part(layout: GroupLayout, source: Shard, destination: Shard, layers: range) -> PagePart | None:
    """None where nothing goes from the one to the other."""
    mine, theirs = layout.heads(source), layout.heads(destination)
    shared = [
        head
        for head in theirs
        if head in mine and layout.sender(head, source.tensor_parallel, destination.rank) == source.rank
    ]
    if not shared:
        return None
    # Where either side has heads between those of two layers, no run goes on in the next one.
    joined = len(layers) if len(shared) == len(mine) == len(theirs) else 1
    layer = np.arange(layers.start, layers.stop, joined, dtype=np.int64)
    places = [
        (layer * len(heads) + (shared[0] - heads.start)) * layout.head_bytes for heads in (mine, theirs)
    ]
    return PagePart(
        (layout.page_bytes(source), layout.page_bytes(destination)),
        np.stack(places, axis=1),
        joined * len(shared) * layout.head_bytes,
        joined == layout.layers,
    )


def merge_runs(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join each run with its successor where both sides go on without a gap. [N, 3] -> [M, 3], M <= N."""
    if len(runs) == 0:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    first = np.flatnonzero(np.concatenate(([True], (ends != runs[1:, :2]).any(axis=1))))
    merged = runs[first].copy()
    merged[:, 2] = np.add.reduceat(runs[:, 2], first)
    return merged
