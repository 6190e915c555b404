"""Staged writes between two ends: every byte arrives once, whatever is lost, fails or comes late."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
from staged_ends import PAGES, Ends, order, settle, until
from torch import Tensor

from antiphon.kv_transfer.in_process import Fault
from antiphon.kv_transfer.ranks import Shipped
from antiphon.kv_transfer.staging import SlotRange
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.rank_messages import ShipOrder, StepMark
from antiphon.protocol.staging_messages import StagedWrite


def test_more_segments_than_slots_arrive_in_their_pages(ends: Ends) -> None:
    first, second = ends.ship(0), ends.ship(1)
    sizes = [each.result(60).size_bytes for each in (first, second)]
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
    assert event.wait(60)


def written_and_waiting(ends: Ends) -> int:
    """Segments that have been written and of which the peer has not said that it spread them."""
    sender = ends.source.endpoint._sender
    assert sender is not None
    return sum(not staged.writing for staged in list(sender._landing.values()))


def is_staged(payload: bytes) -> bool:
    return bool(payload) and isinstance(decode(payload), StagedWrite)


def test_a_lost_word_of_a_staged_write_is_repeated_and_the_write_spread_once(ends: Ends) -> None:
    ends.network.inject(Fault.LOSE_NOTIFICATION, match=is_staged)
    ends.network.inject(Fault.REPEAT_NOTIFICATION, match=is_staged)
    shipped = ends.ship(0)
    until(lambda: ends.network.happened[Fault.LOSE_NOTIFICATION] == 1)
    settle(ends.source, ends.target)
    assert not shipped.done(), "it may still be spread, so it is under way"
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 1)}))
    settle(ends.source, ends.target)
    assert not shipped.done()

    def repeated() -> bool:
        ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
        return shipped.done()

    until(repeated)
    shipped.result()
    ends.ship(1).result(60)
    ends.check()


def test_a_failed_write_fails_the_order_once_nothing_is_under_way(ends: Ends) -> None:
    ends.network.inject(Fault.FAIL_WRITE, match=is_staged)
    with pytest.raises(TransferError, match="failed write"):
        ends.ship(0).result(60)
    ends.ship(0).result(60)  # with the slots that are left
    ends.ship(1).result(60)
    ends.check()


def test_slots_of_refused_writes_are_used_again(ends: Ends) -> None:
    """More refusals, twice each so that nothing is posted, than there are slots."""
    for _ in range(5):
        ends.network.inject(Fault.FAIL_POST, count=2, match=is_staged)
        with pytest.raises(TransferError, match="refused"):
            ends.ship(0).result(60)
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def test_slots_of_failed_writes_are_used_again_once_the_peer_has_severed_the_connection(ends: Ends) -> None:
    for _ in range(3):
        ends.network.inject(Fault.LATE, count=2, match=is_staged)
        with pytest.raises(TransferError, match="failed write"):
            ends.ship(0).result(60)
        waiting = ends.ship(0)  # both slots may still be written by what the network holds
        settle(ends.source, ends.target)
        assert not waiting.done()
        ends.reconnect()
        assert ends.network.release_late() == 0
        ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))  # of what came before the probe
        waiting.result(60)
    ends.ship(1).result(60)
    ends.check()


def test_what_arrives_while_a_writer_is_severed_is_not_spread(ends: Ends) -> None:
    before = ends.target.cache.memory("full").clone()
    ends.network.inject(Fault.LATE, match=is_staged)
    with pytest.raises(TransferError, match="failed write"):
        ends.ship(0).result(60)
    ends.target.cache.memory("full").copy_(before)
    ends.target.arrivals.closed.clear()
    severed = ends.target.endpoint.sever(ends.source.life)
    settle(ends.target)
    assert ends.network.release_late() == 1
    settle(ends.target)
    assert not severed.done()
    ends.target.arrivals.closed.set()
    severed.result(60)
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    ends.connect(severed=True)
    ends.probe()
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def test_ends_of_the_same_connections_are_found_together(ends: Ends) -> None:
    """After the first the writer connects anew, so the others must not look again."""
    ends.target.arrivals.closed.clear()
    endings = [ends.target.endpoint.sever(ends.source.life)]
    settle(ends.target)  # the others look at another time
    endings += [ends.target.endpoint.sever(ends.source.life) for _ in range(2)]
    settle(ends.target)
    assert not any(ending.done() for ending in endings)
    ends.target.arrivals.closed.set()
    for ending in endings:
        ending.result(60)
    assert ends.target.arrivals.found_closed == 1
    ends.connect(severed=True)
    ends.probe()
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def test_a_write_that_took_too_long_is_over_once_it_was_spread(ends: Ends) -> None:
    """It lands in the end, so its pages change: nobody may be told that it is over before that."""
    ends.network.inject(Fault.HOLD, match=is_staged)
    transfer = ends.source.endpoint._transfer
    transfer._write_timeout_s = 0.05
    shipped = ends.ship(0)
    until(lambda: any(record.error is not None for record in transfer._in_flight))
    transfer._write_timeout_s = 120.0  # nothing else is late, however busy the machine is
    spreads = threading.Event()
    ends.target.endpoint._transfer.soon(lambda: assert_set(spreads))
    ends.network.release_held()
    until(lambda: not any(record.error is not None for record in transfer._in_flight))
    settle(ends.source)
    assert not shipped.done(), "it has landed and is not spread yet"
    spreads.set()
    with pytest.raises(TransferError, match="no completion within"):
        shipped.result(60)
    for group in (0, 1, 0):
        ends.ship(group).result(60)
    ends.check()


def test_a_write_whose_word_cannot_be_repeated_is_lost_with_its_connection(ends: Ends) -> None:
    ends.target.arrivals.closed.clear()
    ends.target.endpoint.sever(ends.source.life)  # so that nothing is answered
    settle(ends.target)
    shipped = ends.ship(0)
    until(lambda: written_and_waiting(ends) == 2)  # as many as there are slots
    assert not shipped.done()
    ends.source.endpoint._transfer.run(lambda t: t.disconnect(ends.target.memory.agent_name)).result(60)
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    with pytest.raises(TransferError, match="connection: not connected"):
        shipped.result(60)
    ends.target.arrivals.closed.set()
    ends.reconnect()
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def severed_with_words_lost(ends: Ends) -> tuple[Future[Shipped], Tensor]:
    """A chunk under way of which no word came before its connection was severed; the pages as they were."""
    ends.network.inject(Fault.LOSE_NOTIFICATION, count=2, match=is_staged)
    shipped = ends.ship(0)
    until(lambda: written_and_waiting(ends) == 2)
    before = ends.target.cache.memory("full").clone()
    ends.target.endpoint.sever(ends.source.life).result(60)
    return shipped, before


def test_what_was_given_up_is_not_told_again_over_the_next_connection(ends: Ends) -> None:
    """Who asks, and the connection made anew, come in one turn. By the repeat the peer would change pages."""
    shipped, before = severed_with_words_lost(ends)
    goes_on = threading.Event()
    ends.source.endpoint._transfer.soon(lambda: assert_set(goes_on))
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    them = ends.target.life, 1, [ends.target.memory], SlotRange(0, 2)
    connected = ends.source.endpoint.connect(*them, severed=True)
    goes_on.set()
    connected.result(60)
    with pytest.raises(TransferError, match="severed its connection"):
        shipped.result(60)
    settle(ends.source, ends.target)
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    ends.probe()
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def test_what_was_told_after_the_connection_was_severed_is_not_spread(ends: Ends) -> None:
    """Where nothing can be severed it still arrives, and by then the writer may have given it up."""
    shipped, before = severed_with_words_lost(ends)
    goes_on = threading.Event()
    ends.target.endpoint._transfer.soon(lambda: assert_set(goes_on))
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    settle(ends.source)
    ends.connect(severed=True)
    with pytest.raises(TransferError, match="severed its connection"):
        shipped.result(60)  # its pages are another's from here on
    goes_on.set()
    settle(ends.target)
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    ends.probe()
    ends.ship(0).result(60)
    ends.ship(1).result(60)
    ends.check()


def test_a_word_without_pages_that_cannot_be_sent_shows_a_broken_connection(ends: Ends) -> None:
    """As any other write does: else every order of such a rank would fail, and nobody connect anew."""
    ends.source.endpoint._transfer.run(lambda t: t.disconnect(ends.target.memory.agent_name)).result(60)
    with pytest.raises(TransferError, match="connection: not connected"):
        ends.source.endpoint.ship(ends.target.life, order([], [])).result(60)
    ends.reconnect()
    ends.source.endpoint.ship(ends.target.life, order([], [])).result(60)


def test_a_slot_is_not_said_to_hold_what_is_still_on_its_way(ends: Ends) -> None:
    ends.network.inject(Fault.HOLD, match=is_staged)
    shipped = ends.ship(0)
    until(lambda: ends.network.held == 1)
    ends.source.endpoint.repeat("r", 1, frozenset({WriteKey(0, 0, 0)}))
    settle(ends.source, ends.target)
    ends.network.release_held()
    shipped.result(60)
    ends.ship(1).result(60)
    ends.check()


def test_nothing_of_a_dropped_writer_is_spread(ends: Ends) -> None:
    before = ends.target.cache.memory("full").clone()
    ends.target.endpoint.drop_writer(ends.source.life).result(60)
    shipped = ends.ship(0)
    until(lambda: written_and_waiting(ends) == 2)
    settle(ends.source, ends.target)
    assert not shipped.done()
    assert np.array_equal(before.numpy(), ends.target.cache.memory("full").numpy())
    assert not ends.target.heard


def test_a_peer_that_is_gone_leaves_nothing_under_way(ends: Ends) -> None:
    ends.target.endpoint.drop_writer(ends.source.life).result(60)
    shipped = [ends.ship(0), ends.ship(1)]  # more than there are slots: some wait, some are never answered
    until(lambda: written_and_waiting(ends) == 2)
    settle(ends.source, ends.target)
    assert not any(each.done() for each in shipped)
    ends.source.endpoint.disconnect(ends.target.life).result(60)
    for each in shipped:
        with pytest.raises(TransferError, match=r"d is gone|not connected"):
            each.result(60)


def test_sources_are_waited_for(ends: Ends) -> None:
    ready = threading.Event()
    ends.source.fences.record(StepMark(1, 0), ready.is_set)
    late = ShipOrder("r", 1, 2, 0, 0, ((0, 5),), (), StepMark(1, 0))
    shipped = ends.source.endpoint.ship(ends.target.life, late)
    settle(ends.source, ends.target)
    assert not shipped.done()
    ready.set()
    shipped.result(60)
    assert isinstance(decode(ends.target.heard[0][1]), WriteDone)
