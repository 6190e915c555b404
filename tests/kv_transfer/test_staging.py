"""What is staged: every head of every page once, in few large pieces, in slots that do not overlap."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.plan import GroupLayout, Shard
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.kv_transfer.staging import SlotRange, segments_of, share_bytes, share_of, share_offset
from antiphon.protocol.errors import TransferError
from antiphon.protocol.layer_groups import layer_range
from antiphon.protocol.rank_messages import ShipOrder, StepMark

RANKS = (1, 2, 4, 8)


def order(full: list[tuple[int, int]], sliding: list[tuple[int, int]], group: int = 0) -> ShipOrder:
    return ShipOrder("r", 1, 2, 0, group, tuple(full), tuple(sliding), StepMark(0, 0))


@given(
    st.sampled_from(RANKS),
    st.sampled_from(RANKS),
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_segments_cover_every_head_of_every_page_once(
    source_ranks: int, target_ranks: int, full: int, sliding: int, groups: int, room_pages: int
) -> None:
    layouts = {"full": GroupLayout(5, 8, 64), "sliding": GroupLayout(4, 8, 64)}
    for target_rank in range(target_ranks):
        target = Shard(target_ranks, target_rank)
        seen: dict[tuple[str, int, int, int], int] = {}
        for source_rank in range(source_ranks):
            source = Shard(source_ranks, source_rank)
            share = share_of(layouts["full"], source, target)
            if share is None:
                continue
            first_mine, first_theirs = (
                layouts["full"].heads(source).start,
                layouts["full"].heads(target).start,
            )
            here = [first_mine + h for h in share.mine]
            assert here == [first_theirs + h for h in share.theirs], "both sides mean the same heads"
            for group in range(groups):
                wanted = order(
                    [(i, i + 50) for i in range(full)], [(i, i + 90) for i in range(sliding)], group
                )
                room = 5 * len(share.mine) * 64 * room_pages
                for segment in segments_of(wanted, layouts, groups, share, room):
                    assert 0 < segment.size_bytes <= room
                    total = 0
                    for mine, theirs in zip(segment.source, segment.target, strict=True):
                        assert mine.group == theirs.group
                        layers = layer_range(layouts[mine.group].layers, group, groups)
                        total += len(mine.pages) * len(layers) * len(share.mine) * 64
                        shift = 50 if mine.group == "full" else 90
                        for page, other in zip(mine.pages, theirs.pages, strict=True):
                            assert other == page + shift
                            for layer in layers:
                                for head in here:
                                    place = mine.group, other, layer, head
                                    seen[place] = seen.get(place, 0) + 1
                    assert total == segment.size_bytes
        assert set(seen.values()) <= {1}
        heads = len(layouts["full"].heads(target))
        assert len(seen) == heads * (full * 5 + sliding * 4)


@pytest.mark.parametrize(
    ("source_ranks", "target_ranks", "median"),
    [(1, 1, 4e6), (1, 2, 4e6), (4, 1, 4e6), (2, 4, 4e6), (8, 1, 2e6)],
)
def test_a_prompt_of_8k_moves_in_descriptors_of_megabytes(
    source_ranks: int, target_ranks: int, median: float
) -> None:
    head_bytes = 2 * 64 * 64 * 2
    layouts = {"full": GroupLayout(12, 8, head_bytes), "sliding": GroupLayout(12, 8, head_bytes)}
    sizes = []
    for source_rank, target_rank in itertools.product(range(source_ranks), range(target_ranks)):
        share = share_of(layouts["full"], Shard(source_ranks, source_rank), Shard(target_ranks, target_rank))
        for group in range(4) if share is not None else ():
            wanted = order([(page, page) for page in range(128)], [(126, 0), (127, 1)], group)
            room = share_bytes(32 * 2**20, share)
            sizes += [segment.size_bytes for segment in segments_of(wanted, layouts, 4, share, room)]
    assert sum(sizes) == 130 * 12 * 8 * head_bytes
    assert statistics.median(sizes) >= median


def test_shares_of_a_slot_do_not_overlap() -> None:
    layout = GroupLayout(2, 8, 64)
    for source_ranks in RANKS:
        shares = [share_of(layout, Shard(source_ranks, rank), Shard(2, 1)) for rank in range(source_ranks)]
        spans = [
            (share_offset(3, 2**20, share), share_offset(3, 2**20, share) + share_bytes(2**20, share))
            for share in shares
            if share is not None
        ]
        assert len(spans) == max(1, source_ranks // 2)
        assert min(begin for begin, _ in spans) >= 3 * 2**20
        assert max(end for _, end in spans) <= 4 * 2**20
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_page_that_fits_no_slot_is_an_error() -> None:
    layouts = {"full": GroupLayout(2, 2, 64), "sliding": GroupLayout(2, 2, 64)}
    share = share_of(layouts["full"], Shard(1, 0), Shard(1, 0))
    assert share is not None
    with pytest.raises(TransferError, match="a full page of 256 bytes is larger than 100 of a slot"):
        segments_of(order([(0, 0)], []), layouts, 1, share, 100)


def test_slots_are_dealt_out_until_there_are_none() -> None:
    slots = SlotAllotment(total=7, each=3)
    first, second, third = (Writer(f"prefill-{i}", i) for i in range(3))
    assert (slots.of(first), slots.of(second)) == (SlotRange(0, 3), SlotRange(3, 3))
    assert slots.of(third) is None
    assert slots.of(first) == SlotRange(0, 3)
    slots.end(first)
    assert slots.of(third) == SlotRange(0, 3)
    assert SlotAllotment(total=8, each=0).of(first) is None
