"""What every transport promises, for the real one and the faulty one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Memory, Transport, WriteId, WriteState
from antiphon.protocol.errors import TransferError

Make = Callable[[str], Transport]


@pytest.fixture(params=["in process", "nixl"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    network, opened = InProcessNetwork(), []

    def open_one(name: str) -> Transport:
        opened.append(network.transport(name) if request.param == "in process" else NixlTransport(name))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()


def finish(sender: Transport, receiver: Transport, write: WriteId) -> list[tuple[str, bytes]]:
    """Poll both ends until the write has ended; what the receiver was notified of."""
    notified: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 60
    while sender.state(write) is WriteState.IN_PROGRESS or not notified:
        notified += receiver.notifications()
        assert time.monotonic() < deadline
    assert sender.state(write) is WriteState.DONE
    assert sender.release(write)
    return notified


def test_bytes_and_notification_arrive(make: Make, buffer_type: Any, make_copies: Any) -> None:
    source, target = buffer_type(4096, fill=7), buffer_type(4096)
    sender, receiver = make("sender-a"), make("receiver-a")
    sender.register([source.memory])
    receiver.register([target.memory])
    peer = sender.connect(receiver.metadata())
    assert peer == "receiver-a"
    assert sender.connect(receiver.metadata()) == peer
    write = sender.post_write(
        peer, make_copies(source.memory, target.memory, (0, 100, 50), (200, 1000, 96)), b"first"
    )
    assert finish(sender, receiver, write) == [("sender-a", b"first")]
    expected = [*[0] * 100, *[7] * 50, *[0] * 850, *[7] * 96, *[0] * 3000]
    assert target.bytes.tolist() == expected
    sender.notify(peer, b"alone")
    notified: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 60
    while not notified and time.monotonic() < deadline:
        notified += receiver.notifications()
    assert notified == [("sender-a", b"alone")]


def test_addresses_are_checked(make: Make, buffer_type: Any, make_copies: Any) -> None:
    source, target, foreign = buffer_type(256, fill=1), buffer_type(256), buffer_type(256)
    sender, receiver = make("sender-b"), make("receiver-b")
    sender.register([source.memory])
    receiver.register([target.memory])
    peer = sender.connect(receiver.metadata())
    outside = Memory(target.memory.address, 512)
    for bad in (
        make_copies(source.memory, target.memory, (0, 250, 7)),
        make_copies(source.memory, target.memory, (-1, 0, 7)),
        make_copies(source.memory, target.memory, (0, 0, 0)),
        make_copies(source.memory, target.memory),
        make_copies(foreign.memory, target.memory, (0, 0, 8)),
        make_copies(source.memory, foreign.memory, (0, 0, 8)),
        make_copies(source.memory, outside, (0, 255, 8)),
    ):
        with pytest.raises(TransferError) as caught:
            sender.post_write(peer, bad, b"")
        assert caught.value.stage == "post"
    with pytest.raises(TransferError, match="not connected"):
        sender.post_write("nobody", make_copies(source.memory, target.memory, (0, 0, 8)), b"")
    assert not target.bytes.any()
    assert not foreign.bytes.any()


def test_a_disconnected_peer_cannot_be_written(make: Make, buffer_type: Any, make_copies: Any) -> None:
    source, target = buffer_type(64), buffer_type(64)
    sender, receiver = make("sender-c"), make("receiver-c")
    sender.register([source.memory])
    receiver.register([target.memory])
    peer = sender.connect(receiver.metadata())
    sender.disconnect(peer)
    sender.disconnect(peer)
    with pytest.raises(TransferError, match="not connected"):
        sender.post_write(peer, make_copies(source.memory, target.memory, (0, 0, 8)), b"")
    with pytest.raises(TransferError):
        sender.notify(peer, b"x")


def test_bad_metadata_is_a_handshake_error(make: Make) -> None:
    with pytest.raises(TransferError) as caught:
        make("sender-d").connect(b"not metadata")
    assert caught.value.stage == "handshake"


def test_faults_are_deterministic_from_the_seed(buffer_type: Any, make_copies: Any) -> None:
    def play(seed: int) -> tuple[list[tuple[str, bytes]], bytes, list[str]]:
        rates = dict.fromkeys((Fault.LOSE_NOTIFICATION, Fault.REPEAT_NOTIFICATION, Fault.CORRUPT), 0.3)
        network = InProcessNetwork(seed, rates | {Fault.FAIL_WRITE: 0.1}, max_delay_polls=10)
        source, target = buffer_type(64, fill=1), buffer_type(64)
        sender, receiver = network.transport("s"), network.transport("r")
        sender.register([source.memory])
        receiver.register([target.memory])
        peer = sender.connect(receiver.metadata())
        writes = [
            sender.post_write(peer, make_copies(source.memory, target.memory, (i, i, 1)), bytes([i]))
            for i in range(64)
        ]
        notified = []
        for _ in range(20):
            notified += receiver.notifications()
        return notified, target.bytes.tobytes(), [sender.state(write).name for write in writes]

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_held_writes_land_when_released_and_a_killed_agent_writes_no_more(
    buffer_type: Any, make_copies: Any
) -> None:
    network = InProcessNetwork()
    source, target = buffer_type(64, fill=1), buffer_type(64)
    sender, receiver = network.transport("s"), network.transport("r")
    sender.register([source.memory])
    receiver.register([target.memory])
    peer = sender.connect(receiver.metadata())
    network.inject(Fault.HOLD, count=2)
    copies = make_copies(source.memory, target.memory, (0, 0, 64))
    held = sender.post_write(peer, copies, b"held")
    for _ in range(10):
        assert receiver.notifications() == []
    assert not sender.release(held)
    assert network.held == 1
    network.release_held()
    assert receiver.notifications() == [("s", b"held")]
    assert sender.release(held)
    target.bytes[:] = 0
    sender.post_write(peer, copies, b"never")
    network.kill("s")
    network.release_held()
    assert receiver.notifications() == []
    assert not target.bytes.any()
