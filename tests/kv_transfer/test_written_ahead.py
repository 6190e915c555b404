"""Orders to a peer whose pages are mapped: given to the GPU before their source is computed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from mapped_network import MappedNetwork
from staged_ends import PAGES, Side, order, settle, until
from transfer_ends import at_rest

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kv_transfer.mapped_transport import MappedTransport
from antiphon.kv_transfer.measured_transport import WriteLog, measured
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import DeviceFence, StepFences
from antiphon.kv_transfer.transport import Transport
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.kv_messages import WriteDone
from antiphon.protocol.rank_messages import ShipOrder, StepMark

FULL = ((0, 5), (2, 1))


class MeasuredNetwork(MappedNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.log = WriteLog()

    def transport(self, agent_name: str) -> Transport:  # type: ignore[override]
        return measured(super().transport, self.log)(agent_name)


class Ends:
    """A writer and a mapped peer, both with slots that nothing needs."""

    def __init__(self) -> None:
        self.network = MeasuredNetwork()
        self.device = self.network.device
        self.source, self.target = Side(self.network, "p", 1, 2), Side(self.network, "d", 2, 4)
        for group in ("full", "sliding"):
            self.source.cache.memory(group).normal_()
        them = self.target.life, 1, [self.target.memory], SlotRange(0, 2)
        assert self.source.endpoint.connect(*them).result(60), "its pages are mapped"

    def ordered(self, step: int) -> ShipOrder:
        return ShipOrder(f"r{step}", 1, 2, 0, 0, FULL, (), StepMark(step, 0))

    def check(self) -> None:
        layers = self.source.cache.memory("full").shape[1] // 2
        for mine, theirs in FULL:
            sent, found = self.source.cache.memory("full")[mine], self.target.cache.memory("full")[theirs]
            assert np.array_equal(sent[:layers].numpy(), found[:layers].numpy())


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for side in (made.source, made.target):
        side.endpoint.stop()
        assert not side.failures


def fence(passed: threading.Event, handle: int) -> DeviceFence:
    return DeviceFence(passed.is_set, handle, passed)


def test_a_copy_is_given_to_the_gpu_before_its_source_is_computed(ends: Ends) -> None:
    computed = threading.Event()
    ends.device.goes_on.clear()
    shipped = ends.source.endpoint.ship(ends.target.life, ends.ordered(1))
    settle(ends.source)
    assert ends.device.waited_for == [], "its step was not issued"
    ends.source.fences.record(StepMark(1, 0), fence(computed, 77))
    until(lambda: ends.device.waited_for == [77])
    assert not shipped.done()
    computed.set()
    ends.device.goes_on.set()
    assert shipped.result(60).size_bytes == ends.device.copied_bytes
    until(lambda: len(ends.target.heard) == 1)
    assert isinstance(decode(ends.target.heard[0][1]), WriteDone)
    ends.check()


def test_a_copy_is_begun_by_who_orders_it_while_the_transport_rests(ends: Ends) -> None:
    goes_on = at_rest(ends.source.endpoint._transfer)
    ends.source.fences.record(StepMark(1, 0), fence(set_event(), 77))
    shipped = ends.source.endpoint.ship(ends.target.life, ends.ordered(1))
    assert ends.device.waited_for == [None]
    assert not shipped.done(), "its word is for the transport's own thread"
    goes_on.set()
    shipped.result(60)
    ends.check()


def test_each_order_copies_its_own_pages(ends: Ends) -> None:
    ends.source.endpoint.ship(ends.target.life, order([(1, 7)], [])).result(60)
    ends.source.endpoint.ship(ends.target.life, order(list(FULL), [])).result(60)
    ends.check()


BAD_PAGES = [([(0, 5), (2, PAGES + 1)], [], r"full pages \[13\] of d, which has 13")]
BAD_PAGES += [([(0, 5)], [(1, 3), (2, 3)], r"sliding pages \[3\] of d more than once")]


@pytest.mark.parametrize(("full", "sliding", "reason"), BAD_PAGES)
@pytest.mark.parametrize("way", ["mapped", "staged", "direct"])
def test_pages_that_the_peer_does_not_have_fail_their_order_alone(
    full: list[tuple[int, int]], sliding: list[tuple[int, int]], reason: str, way: str, ends: Ends
) -> None:
    endpoint, life = ends.source.endpoint, ends.target.life
    if way != "mapped":
        endpoint._mapped.clear()
    if way == "direct":
        endpoint._slots.clear()
    for _ in range(2):
        with pytest.raises(TransferError, match=reason) as caught:
            endpoint.ship(life, order(full, sliding)).result(60)
        assert caught.value.stage == "post"
    assert not ends.target.heard
    assert not ends.target.cache.memory("full").any()
    endpoint._mapped.add(life)
    endpoint.ship(life, order(list(FULL), [])).result(60)
    ends.check()


def test_pages_are_checked_again_for_what_the_peer_says_next(ends: Ends) -> None:
    """Of a handshake anew, with the same pages ordered."""
    endpoint, life = ends.source.endpoint, ends.target.life
    endpoint.ship(life, order(list(FULL), [])).result(60)
    regions = tuple(
        msgspec.structs.replace(each, pages=5) if each.group == "full" else each
        for each in ends.target.memory.regions
    )
    endpoint.connect(life, 1, [msgspec.structs.replace(ends.target.memory, regions=regions)]).result(60)
    with pytest.raises(TransferError, match=r"full pages \[5\] of d, which has 5"):
        endpoint.ship(life, order(list(FULL), [])).result(60)


def test_a_source_that_is_computed_is_not_waited_for(ends: Ends) -> None:
    ends.source.fences.record(StepMark(1, 0), fence(set_event(), 77))
    ends.source.endpoint.ship(ends.target.life, ends.ordered(1)).result(60)
    assert ends.device.waited_for == [None]
    ends.check()


def test_a_source_without_an_event_is_waited_for_by_the_host(ends: Ends) -> None:
    computed = threading.Event()
    ends.source.fences.record(StepMark(1, 0), computed.is_set)
    shipped = ends.source.endpoint.ship(ends.target.life, ends.ordered(1))
    settle(ends.source)
    assert ends.device.waited_for == []
    computed.set()
    shipped.result(60)
    assert ends.device.waited_for == [None]
    ends.check()


def test_a_write_is_timed_from_when_its_source_was_computed(ends: Ends) -> None:
    ends.source.endpoint._transfer._write_timeout_s = 0.05
    computed = threading.Event()
    ends.source.fences.record(StepMark(1, 0), fence(computed, 77))
    ends.device.goes_on.clear()
    shipped = ends.source.endpoint.ship(ends.target.life, ends.ordered(1))
    until(lambda: ends.device.waited_for == [77])
    time.sleep(0.1)
    settle(ends.source)
    assert not shipped.done(), "no write takes too long whose source is not there"
    assert not any(record.error for record in ends.source.endpoint._transfer._in_flight)
    computed.set()
    until(lambda: any(record.error for record in ends.source.endpoint._transfer._in_flight))
    assert not shipped.done(), "the copy may still write"
    ends.device.goes_on.set()
    with pytest.raises(TransferError, match=r"no completion within 0\.05 s"):
        shipped.result(60)


def test_what_is_measured_of_a_write_begins_with_its_source(ends: Ends) -> None:
    computed = threading.Event()
    ends.source.fences.record(StepMark(1, 0), fence(computed, 77))
    ends.device.goes_on.clear()
    shipped = ends.source.endpoint.ship(ends.target.life, ends.ordered(1))
    until(lambda: ends.device.waited_for == [77])
    time.sleep(0.1)
    began = time.monotonic()
    computed.set()
    ends.device.goes_on.set()
    shipped.result(60)
    (sample,) = ends.network.log.take()
    assert 0 < sample.seconds < time.monotonic() - began
    assert sample.descriptors == len(FULL)


def test_an_order_does_not_wait_for_a_peer_that_is_not_mapped(ends: Ends) -> None:
    """Its pages were unmapped after the order was given, so only the host could begin."""
    transport = ends.source.endpoint._transfer.run(lambda transport: transport).result(60)
    inner = transport._inner  # type: ignore[attr-defined]
    assert isinstance(inner, MappedTransport)
    ends.source.endpoint._transfer.run(lambda _: inner._mapped.clear()).result(60)
    ends.source.fences.record(StepMark(1, 0), fence(threading.Event(), 77))
    with pytest.raises(TransferError, match="cannot wait for a GPU") as caught:
        ends.source.endpoint.ship(ends.target.life, ends.ordered(1)).result(60)
    assert caught.value.stage == "post"


def test_who_orders_a_copy_works_on_the_pages_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may begin the copy, and on GPU 0 it would take memory of another rank's."""
    used: list[tuple[int, int]] = []
    regions = PagedKvCache.memory_regions
    on_gpu = {"memory": "VRAM", "device": 3}
    monkeypatch.setattr(
        PagedKvCache,
        "memory_regions",
        lambda cache: tuple(msgspec.structs.replace(each, **on_gpu) for each in regions(cache)),
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: used.append((threading.get_ident(), gpu)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    ends = Ends()
    copy, used_before = ends.device.copy, []
    monkeypatch.setattr(ends.device, "copy", lambda *given: (used_before.extend(used), copy(*given))[1])
    ends.source.endpoint.ship(ends.target.life, order(list(FULL), [])).result(60)
    for side in (ends.source, ends.target):
        side.endpoint.stop()
    assert (threading.get_ident(), 3) in used_before
    ends.check()


def test_nothing_is_staged_for_a_mapped_peer(ends: Ends) -> None:
    ends.source.endpoint.ship(ends.target.life, order(list(FULL), [(3, 4)])).result(60)
    assert ends.device.copied_bytes > 0
    ends.check()
    assert ends.source.endpoint._sender is not None
    assert not ends.source.endpoint._sender._free, "no slot of the peer was asked for"


def test_fences_give_the_first_event_that_covers_a_mark() -> None:
    fences, first, second = StepFences(), threading.Event(), threading.Event()
    assert fences.device_fence(StepMark(1, 0)) is None
    fences.record(StepMark(1, 0), fence(first, 1))
    fences.record(StepMark(1, 2), fence(second, 2))
    handles = {group: fences.device_fence(StepMark(1, group)) for group in (0, 1, 2, 3)}
    assert {group: found and found.handle for group, found in handles.items()} == {0: 1, 1: 2, 2: 2, 3: None}
    first.set()
    assert fences.device_fence(StepMark(1, 0)) is None
    assert fences.passed(StepMark(1, 0))
    second.set()
    assert fences.device_fence(StepMark(1, 2)) is None


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_peer_whose_pages_lie_beyond_what_it_offers_is_not_written_by_the_gpu(ends: Ends) -> None:
    endpoint, life = ends.source.endpoint, ends.target.life
    regions = tuple(
        msgspec.structs.replace(each, address=each.address + 2**30) if each.group == "full" else each
        for each in ends.target.memory.regions
    )
    elsewhere = msgspec.structs.replace(ends.target.memory, regions=regions)
    assert not endpoint.connect(life, 1, [elsewhere]).result(60)
    assert endpoint.connect(life, 1, [ends.target.memory]).result(60)
