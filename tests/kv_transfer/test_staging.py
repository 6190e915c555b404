"""Staged writes: every byte of every page arrives once, whatever the layouts, the slots and the losses."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_staging import KvStaging
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.leases import Writer
from antiphon.kv_transfer.plan import GroupLayout, Shard, layer_range
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.slot_allotment import SlotAllotment
from antiphon.kv_transfer.staging import SlotRange, segments_of, share_bytes, share_of, share_offset
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.model.config import GptOssConfig
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.rank_messages import ShipOrder, StepMark
from antiphon.protocol.staging_messages import StagedWrite

RANKS = (1, 2, 4, 8)
SHAPE = GptOssConfig(
    num_hidden_layers=4,
    num_experts=4,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    sliding_window=32,
)
PAGES, PAGE = 12, 16


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
@settings(deadline=None, max_examples=60)
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


class NetworkArrivals:
    """What arrives at one agent of a network of this process."""

    def __init__(self, network: InProcessNetwork, agent: str) -> None:
        self.network, self.agent = network, agent
        self.closed = threading.Event()
        self.closed.set()
        """Cleared: a severed connection takes its time to close."""
        self.found_closed = 0

    def begin_claim(self) -> None: ...

    def claim(self, writer: tuple[str, int]) -> None: ...

    def received_bytes(self, writer: tuple[str, int]) -> int:
        return 0

    def sever(self, writer: tuple[str, int]) -> bool:
        if not self.closed.is_set():
            return False
        self.network.sever(f"{writer[0]}/{writer[1]:x}/", self.agent)
        self.found_closed += 1
        return True


class Side:
    """One rank of one worker, over a network of this process."""

    def __init__(self, network: InProcessNetwork, name: str, epoch: int, slots: int) -> None:
        import torch

        self.arrivals = NetworkArrivals(network, f"{name}/{epoch:x}/0")
        self.cache = PagedKvCache(
            SHAPE, full_pages=PAGES, sliding_pages=PAGES, page_size=PAGE, dtype=torch.float32
        )
        self.heard: list[tuple[str, bytes]] = []
        self.failures: list[BaseException] = []
        self.fences = StepFences()
        fingerprint = self.cache.fingerprint("m", "")
        self.endpoint = KvEndpoint(
            EndpointSettings(name, epoch, fingerprint, layer_groups=2, write_timeout_s=20.0),
            Shard(1, 0),
            self.cache,
            self.fences,
            staging=KvStaging(self.cache, slots, 2**14),
            on_notification=lambda sender, payload: self.heard.append((sender, payload)),
            on_landed=lambda sender, payload: self.heard.append((sender, payload)),
            on_failure=self.failures.append,
            transport_factory=network.transport,
            arrivals=self.arrivals,
        )
        self.memory = self.endpoint.start()
        self.life = PeerLife(name, epoch)


class Ends:
    def __init__(self) -> None:
        self.network = InProcessNetwork(max_delay_polls=3)
        self.source, self.target = Side(self.network, "p", 1, 2), Side(self.network, "d", 2, 4)
        for group in ("full", "sliding"):
            self.source.cache.memory(group).normal_()
        self.connect(severed=False)
        self.target.endpoint.connect(self.source.life, 1, [self.source.memory]).result(5)

    def connect(self, *, severed: bool) -> None:
        them = self.target.life, 1, [self.target.memory], SlotRange(0, 2)
        self.source.endpoint.connect(*them, severed=severed).result(5)

    def reconnect(self) -> None:
        """What the two workers do when a connection broke."""
        self.target.endpoint.sever(self.source.life).result(5)
        self.connect(severed=True)

    def ship(self, group: int) -> Any:
        full = [(page, (page * 5 + 1) % PAGES) for page in range(PAGES)]
        return self.source.endpoint.ship(self.target.life, order(full, [(3, 4), (1, 0)], group))

    def check(self) -> None:
        for group, pairs in (
            ("full", [(p, (p * 5 + 1) % PAGES) for p in range(PAGES)]),
            ("sliding", [(3, 4), (1, 0)]),
        ):
            mine, theirs = self.source.cache.memory(group), self.target.cache.memory(group)
            for page, other in pairs:
                assert np.array_equal(mine[page].numpy(), theirs[other].numpy())


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for side in (made.source, made.target):
        side.endpoint.stop()
        assert not side.failures


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_more_segments_than_slots_arrive_in_their_pages(ends: Ends) -> None:
    first, second = ends.ship(0), ends.ship(1)
    sizes = [each.result(20).size_bytes for each in (first, second)]
    pages = (PAGES + 2) * ends.source.cache.page_bytes("full") // 2
    assert sizes == [pages, pages]
    ends.check()
    messages = [decode(payload) for _, payload in ends.target.heard]
    parts = {(m.key.layer_group, m.part): m.parts for m in messages if isinstance(m, WriteDone)}
    assert len(parts) == len(messages) > 4, "several slots' worth, and each said once"
    assert {group for group, _ in parts} == {0, 1}
    again = decode(first.result().notification)
    assert isinstance(again, WriteDone)
    assert (again.key, again.parts) == (WriteKey(0, 0, 0), 1)


def is_staged(payload: bytes) -> bool:
    return bool(payload) and isinstance(decode(payload), StagedWrite)


def test_a_lost_word_of_a_staged_write_is_repeated_and_the_write_spread_once(ends: Ends) -> None:
    ends.network.inject(Fault.LOSE_NOTIFICATION, match=is_staged)
    ends.network.inject(Fault.REPEAT_NOTIFICATION, match=is_staged)
    shipped = ends.ship(0)
    until(lambda: ends.network.happened[Fault.LOSE_NOTIFICATION] == 1)
    time.sleep(0.1)
    assert not shipped.done(), "it may still be spread, so it is under way"
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 1)}))
    time.sleep(0.05)
    assert not shipped.done()
    while not shipped.done():
        ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
        time.sleep(0.01)
    shipped.result()
    ends.ship(1).result(20)
    ends.check()


def test_a_failed_write_fails_the_order_once_nothing_is_under_way(ends: Ends) -> None:
    ends.network.inject(Fault.FAIL_WRITE, match=is_staged)
    with pytest.raises(TransferError, match="failed write"):
        ends.ship(0).result(20)
    ends.ship(0).result(20)  # with the slots that are left
    ends.ship(1).result(20)
    ends.check()


def test_slots_of_refused_writes_are_used_again(ends: Ends) -> None:
    """More refusals, twice each so that nothing is posted, than there are slots."""
    for _ in range(5):
        ends.network.inject(Fault.FAIL_POST, count=2, match=is_staged)
        with pytest.raises(TransferError, match="refused"):
            ends.ship(0).result(20)
    ends.ship(0).result(20)
    ends.ship(1).result(20)
    ends.check()


def test_slots_of_failed_writes_are_used_again_once_the_peer_has_severed_the_connection(ends: Ends) -> None:
    for _ in range(3):
        ends.network.inject(Fault.LATE, count=2, match=is_staged)
        with pytest.raises(TransferError, match="failed write"):
            ends.ship(0).result(20)
        waiting = ends.ship(0)  # both slots may still be written by what the network holds
        time.sleep(0.05)
        assert not waiting.done()
        ends.reconnect()
        assert ends.network.release_late() == 0
        waiting.result(20)
    ends.ship(1).result(20)
    ends.check()


def test_what_arrives_while_a_writer_is_severed_is_not_spread(ends: Ends) -> None:
    before = ends.target.cache.memory("full").clone()
    ends.network.inject(Fault.LATE, match=is_staged)
    with pytest.raises(TransferError, match="failed write"):
        ends.ship(0).result(20)
    ends.target.cache.memory("full").copy_(before)
    ends.target.arrivals.closed.clear()
    severed = ends.target.endpoint.sever(ends.source.life)
    time.sleep(0.05)
    assert ends.network.release_late() == 1
    time.sleep(0.05)
    assert not severed.done()
    ends.target.arrivals.closed.set()
    severed.result(5)
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    ends.connect(severed=True)
    ends.ship(0).result(20)
    ends.ship(1).result(20)
    ends.check()


def test_ends_of_the_same_connections_are_found_together(ends: Ends) -> None:
    """After the first the writer connects anew, so the others must not look again."""
    ends.target.arrivals.closed.clear()
    endings = [ends.target.endpoint.sever(ends.source.life)]
    time.sleep(0.005)  # the others look at another time
    endings += [ends.target.endpoint.sever(ends.source.life) for _ in range(2)]
    time.sleep(0.05)
    assert not any(ending.done() for ending in endings)
    ends.target.arrivals.closed.set()
    for ending in endings:
        ending.result(5)
    assert ends.target.arrivals.found_closed == 1
    ends.connect(severed=True)
    ends.ship(0).result(20)
    ends.ship(1).result(20)
    ends.check()


def test_a_write_that_took_too_long_is_over_once_it_was_spread(ends: Ends) -> None:
    """It lands in the end, so its pages change: nobody may be told that it is over before that."""
    ends.network.inject(Fault.HOLD, match=is_staged)
    transfer = ends.source.endpoint._transfer
    transfer._write_timeout_s = 0.05
    shipped = ends.ship(0)
    until(lambda: any(record.error is not None for record in transfer._in_flight))
    transfer._write_timeout_s = 20.0  # nothing else is late, however busy the machine is
    time.sleep(0.05)
    assert not shipped.done()
    ends.network.release_held()
    with pytest.raises(TransferError, match="no completion within"):
        shipped.result(20)
    for group in (0, 1, 0):
        ends.ship(group).result(20)
    ends.check()


def test_a_write_whose_word_cannot_be_repeated_is_lost_with_its_connection(ends: Ends) -> None:
    ends.target.arrivals.closed.clear()
    ends.target.endpoint.sever(ends.source.life)  # so that nothing is answered
    shipped = ends.ship(0)
    time.sleep(0.1)
    assert not shipped.done()
    ends.source.endpoint._transfer.run(lambda t: t.disconnect(ends.target.memory.agent_name)).result(5)
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    with pytest.raises(TransferError, match="connection: not connected"):
        shipped.result(5)
    ends.target.arrivals.closed.set()
    ends.reconnect()
    ends.ship(0).result(20)
    ends.ship(1).result(20)
    ends.check()


def test_a_slot_is_not_said_to_hold_what_is_still_on_its_way(ends: Ends) -> None:
    ends.network.inject(Fault.HOLD, match=is_staged)
    shipped = ends.ship(0)
    until(lambda: ends.network.held == 1)
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    time.sleep(0.05)
    ends.network.release_held()
    shipped.result(20)
    ends.ship(1).result(20)
    ends.check()


def test_nothing_of_a_dropped_writer_is_spread(ends: Ends) -> None:
    before = ends.target.cache.memory("full").clone()
    ends.target.endpoint.drop_writer(ends.source.life).result(5)
    shipped = ends.ship(0)
    time.sleep(0.2)
    assert not shipped.done()
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    assert not ends.target.heard


def test_a_peer_that_is_gone_leaves_nothing_under_way(ends: Ends) -> None:
    ends.target.endpoint.drop_writer(ends.source.life).result(5)
    shipped = [ends.ship(0), ends.ship(1)]  # more than there are slots: some wait, some are never answered
    time.sleep(0.2)
    assert not any(each.done() for each in shipped)
    ends.source.endpoint.disconnect(ends.target.life).result(5)
    for each in shipped:
        with pytest.raises(TransferError, match=r"d is gone|not connected"):
            each.result(5)


def test_sources_are_waited_for(ends: Ends) -> None:
    ready = threading.Event()
    ends.source.fences.record(StepMark(1, 0), ready.is_set)
    late = ShipOrder("r", 1, 2, 0, 0, ((0, 5),), (), StepMark(1, 0))
    shipped = ends.source.endpoint.ship(ends.target.life, late)
    time.sleep(0.05)
    assert not shipped.done()
    ready.set()
    shipped.result(5)
    assert isinstance(decode(ends.target.heard[0][1]), WriteDone)
