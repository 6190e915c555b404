"""The transfer plan: every destination byte exactly once, for any TP on either side, in few runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.kernels.fp8_pages import head_bytes
from antiphon.kv_transfer.handshake import page_pairs
from antiphon.kv_transfer.plan import GroupLayout, Shard, group_layouts, merge_runs, plan_runs
from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.layer_groups import layer_range

TP = st.sampled_from([1, 2, 4, 8])


def labelled(layout: GroupLayout, shard: Shard, pages: int) -> np.ndarray:
    """A rank's memory where every byte says what it is: (page, layer, head, byte) as one number."""
    page, layer, head, byte = np.meshgrid(
        np.arange(pages),
        np.arange(layout.layers),
        np.array(layout.heads(shard)),
        np.arange(layout.head_bytes),
        indexing="ij",
    )
    return (((page * 100 + layer) * 100 + head) * 100 + byte).reshape(-1)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    source_tp=TP,
    destination_tp=TP,
    kv_heads=st.sampled_from([1, 2, 8]),
    layers=st.integers(1, 5),
    layer_groups=st.integers(1, 3),
    data=st.data(),
)
def test_every_destination_byte_is_written_once_with_the_right_content(
    source_tp: int, destination_tp: int, kv_heads: int, layers: int, layer_groups: int, data: st.DataObject
) -> None:
    layout = GroupLayout(layers, kv_heads, head_bytes=3)
    pages = 6
    count = data.draw(st.integers(1, pages))
    chosen = [data.draw(st.permutations(range(pages))) for _ in range(2)]
    pairs = list(zip(chosen[0][:count], chosen[1][:count], strict=True))
    source_of = {destination: source for source, destination in pairs}
    for rank in range(destination_tp):
        destination = Shard(destination_tp, rank)
        size = pages * layout.page_bytes(destination)
        written, times = np.full(size, -1), np.zeros(size, dtype=int)
        for source_rank in range(source_tp):
            source = Shard(source_tp, source_rank)
            memory = labelled(layout, source, pages)
            for group in range(layer_groups):
                part = layer_range(layers, group, layer_groups)
                for begin, to, length in plan_runs(layout, source, destination, pairs, part).tolist():
                    assert length > 0
                    written[to : to + length] = memory[begin : begin + length]
                    times[to : to + length] += 1
        wanted = labelled(layout, destination, pages).reshape(pages, -1)
        for page in range(pages):
            here = slice(page * layout.page_bytes(destination), (page + 1) * layout.page_bytes(destination))
            if page in source_of:
                assert (times[here] == 1).all()
                moved = wanted[page] + (source_of[page] - page) * 1_000_000
                assert (written[here] == moved).all()
            else:
                assert (times[here] == 0).all()


def test_neighbouring_pages_become_one_run() -> None:
    layout = GroupLayout(layers=12, kv_heads=8, head_bytes=16_384)
    one = Shard(1, 0)
    pages = [(10 + i, 50 + i) for i in range(128)]
    runs = plan_runs(layout, one, one, list(reversed(pages)), range(12))
    page = layout.page_bytes(one)
    assert runs.tolist() == [[10 * page, 50 * page, 128 * page]]
    half = plan_runs(layout, one, one, pages, range(6))
    assert len(half) == 128, "half of the layers of each page is one run"


def test_runs_per_page_when_heads_are_split() -> None:
    layout = GroupLayout(layers=12, kv_heads=8, head_bytes=16_384)
    runs = plan_runs(layout, Shard(1, 0), Shard(4, 1), [(0, 0), (1, 1)], range(12))
    assert len(runs) == 24
    assert set(runs[:, 2].tolist()) == {2 * 16_384}
    assert len(plan_runs(layout, Shard(4, 1), Shard(4, 2), [(0, 0)], range(12))) == 0


def test_a_gap_on_either_side_keeps_runs_apart() -> None:
    runs = np.array([[0, 0, 4], [4, 8, 4], [8, 12, 4], [16, 16, 4]], dtype=np.int64)
    assert merge_runs(runs).tolist() == [[0, 0, 4], [4, 8, 8], [16, 16, 4]]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(HandshakeError, match="8 kv heads cannot be spread over 3 ranks"):
        GroupLayout(1, 8, 1).heads(Shard(3, 0))
    for kinds in (("int3", "bfloat16"), ("bfloat16", "int3")):
        fingerprint = KvFingerprint(1, "m", "", kinds[0], 64, 1, 1, 8, 64, 128, "", kinds[1])
        with pytest.raises(HandshakeError, match="int3"):
            group_layouts(fingerprint)


def test_full_layers_in_fp8_have_smaller_pages_of_their_own() -> None:
    layouts = group_layouts(KvFingerprint(1, "m", "", "bfloat16", 64, 12, 12, 8, 64, 128, "", "fp8_e4m3"))
    assert layouts["sliding"].head_bytes == 2 * 64 * 64 * 2
    assert layouts["full"].head_bytes == head_bytes(64, 64) == 2 * 64 * 64 + 2 * 2 * 64


@pytest.mark.parametrize(("source_ranks", "target_ranks"), [(2, 1), (1, 2), (4, 2), (2, 4), (1, 1)])
def test_fp8_pages_arrive_bit_for_bit_under_any_layout(source_ranks: int, target_ranks: int) -> None:
    heads, page, width, layers = 4, 16, 8, 3
    layout = GroupLayout(layers, heads, head_bytes(page, width))
    whole = np.random.default_rng(1).integers(0, 256, (5, layers, heads, head_bytes(page, width)), np.uint8)
    pairs = [(0, 2), (3, 0), (4, 4)]

    def part(ranks: int, rank: int) -> NDArray[np.uint8]:
        held = layout.heads(Shard(ranks, rank))
        return np.ascontiguousarray(whole[:, :, held.start : held.stop])

    for target_rank in range(target_ranks):
        expected = part(target_ranks, target_rank)
        found = np.zeros_like(expected)
        for source_rank in range(source_ranks):
            mine = part(source_ranks, source_rank).reshape(-1)
            shards = Shard(source_ranks, source_rank), Shard(target_ranks, target_rank)
            for begin, to, length in plan_runs(layout, *shards, pairs, range(layers)).tolist():
                found.reshape(-1)[to : to + length] = mine[begin : begin + length]
        for source, target in pairs:
            assert np.array_equal(found[target], expected[source])
        assert not found[[1, 3]].any()


def test_only_wanted_pages_are_paired() -> None:
    computed = [(0, 7), (1, 8), (2, 9), (3, 10)]
    assert page_pairs(computed, [100, 101], first_logical=1) == [(8, 100), (9, 101)]
    assert page_pairs(computed, [], first_logical=0) == []
