"""Staged writes between two ends: every byte arrives once, whatever is lost, fails or comes late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_staging import KvStaging
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.model.config import GptOssConfig
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.rank_messages import ShipOrder, StepMark
from antiphon.protocol.staging_messages import StagedWrite

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


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


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
    spreads = threading.Event()
    ends.target.endpoint._transfer.soon(lambda: assert_set(spreads))
    ends.network.release_held()
    until(lambda: not any(record.error is not None for record in transfer._in_flight))
    time.sleep(0.05)
    assert not shipped.done(), "it has landed and is not spread yet"
    spreads.set()
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
