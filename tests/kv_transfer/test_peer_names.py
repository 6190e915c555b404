"""Metadata of another agent than was to be connected: nothing is kept of it, nobody's is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from mapped_ends import Pair, inside
from shared_memory_device import Allocation

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.measured_transport import MeasuredTransport, WriteLog
from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Transport, WriteState
from antiphon.protocol.errors import TransferError

Make = Callable[[str], Transport]


@pytest.fixture(params=["in process", "nixl"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    network, opened = InProcessNetwork(), []

    def open_one(name: str) -> Transport:
        inner = network.transport(name) if request.param == "in process" else NixlTransport(name)
        opened.append(MeasuredTransport(inner, WriteLog()))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()


def test_another_agents_metadata_is_not_connected(make: Make, buffer_type: Any, make_copies: Any) -> None:
    source, target = buffer_type(64, fill=1), buffer_type(64)
    sender, receiver = make("p/1/0"), make("d/1/0")
    sender.register([source.memory])
    receiver.register([target.memory])
    with pytest.raises(TransferError, match="metadata of d/1/0 instead of d/2/0") as caught:
        sender.connect(receiver.metadata(), "d/2/0")
    assert caught.value.stage == "handshake"
    copies = make_copies(source.memory, target.memory, (0, 0, 16))
    for name in ("d/1/0", "d/2/0"):
        with pytest.raises(TransferError, match="not connected"):
            sender.post_write(name, copies, b"")
    assert sender.connect(receiver.metadata(), "d/1/0") == "d/1/0"


def test_a_connected_agent_whose_metadata_another_shows_stays_connected(
    make: Make, buffer_type: Any, make_copies: Any
) -> None:
    source, target = buffer_type(64, fill=1), buffer_type(64)
    sender, receiver = make("p/1/1"), make("d/1/1")
    sender.register([source.memory])
    receiver.register([target.memory])
    sender.connect(receiver.metadata(), "d/1/1")
    with pytest.raises(TransferError, match="metadata of d/1/1 instead of d/2/1"):
        sender.connect(receiver.metadata(), "d/2/1")
    write = sender.post_write("d/1/1", make_copies(source.memory, target.memory, (0, 0, 16)), b"word")
    notified, deadline = [], time.monotonic() + 60
    while sender.state(write) is WriteState.IN_PROGRESS or not notified:
        notified += receiver.notifications()
        assert time.monotonic() < deadline
    assert notified == [("p/1/1", b"word")]
    assert target.bytes[:17].tolist() == [*[1] * 16, 0]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def theirs_with(pair: Pair, memory: Allocation | None) -> bytes:
    """Metadata under the receiver's name that offers other memory, or none."""
    said = msgspec.msgpack.decode(pair.receiver.metadata())
    pair.theirs = [] if memory is None else [inside(memory.memory)]
    said["offers"] = msgspec.msgpack.decode(pair.make_receiver("liar").metadata())["offers"]
    return msgspec.msgpack.encode(said)


def test_memory_under_another_name_is_not_mapped(pair: Pair) -> None:
    """Though that one's is not mapped yet: what was written to it would land there."""
    lie = theirs_with(pair, Allocation(pair.host, 4096))
    with pytest.raises(TransferError, match="metadata of d/1 instead of d/7"):
        pair.writer.connect(lie, "d/7")
    assert not pair.device.opened
    assert not pair.writer.maps("d/1")
    assert not pair.writer.maps("d/7")
    pair.writer.connect(pair.receiver.metadata(), "d/1")
    assert pair.device.opened == {pair.target.handle: 1}


@pytest.mark.parametrize("expected", ["d/1", "d/7"])
@pytest.mark.parametrize("offers", ["other memory", "nothing"])
def test_a_living_peers_mapping_is_never_replaced(offers: str, expected: str, pair: Pair) -> None:
    mine = list(pair.theirs)
    pair.writer.connect(pair.receiver.metadata(), "d/1")
    lie = theirs_with(pair, Allocation(pair.host, 4096) if offers == "other memory" else None)
    reason = "other memory than before" if expected == "d/1" else "metadata of d/1 instead of d/7"
    with pytest.raises(TransferError, match=reason):
        pair.writer.connect(lie, expected)
    assert pair.device.opened == {pair.target.handle: 1}
    assert not pair.device.closed
    pair.theirs = mine
    pair.writer.release(pair.post())
    pair.check_written()
