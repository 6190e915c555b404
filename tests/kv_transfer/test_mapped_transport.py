"""Writes straight into a peer's memory: every state, every refusal, and who keeps what mapped until when."""

from __future__ import annotations

import logging

import msgspec
import pytest
from mapped_ends import Pair, Reach, inside, runs
from shared_memory_device import Allocation, SharedMemoryDevice

from antiphon.kv_transfer.host import host_identity
from antiphon.kv_transfer.in_process import InProcessTransport
from antiphon.kv_transfer.mapped_transport import Side, with_same_host
from antiphon.kv_transfer.transport import Copies, Memory, WriteState
from antiphon.protocol.errors import TransferError


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_write_is_a_copy_and_its_word_follows_once_it_is_over(pair: Pair) -> None:
    assert pair.writer.connect(pair.receiver.metadata()) == "d/1"
    assert pair.writer.maps("d/1")
    pair.device.holds = True
    write = pair.post()
    assert pair.writer.state(write) is WriteState.IN_PROGRESS
    assert not pair.writer.release(write)
    assert pair.receiver.notifications() == []
    assert not pair.target.bytes.any()
    pair.device.copies[0].let_go()
    assert pair.writer.state(write) is WriteState.DONE
    assert pair.receiver.notifications() == [("p", b"word")]
    assert pair.writer.state(write) is WriteState.DONE
    assert pair.receiver.notifications() == [], "said once"
    assert pair.writer.release(write)
    pair.check_written()


def test_memory_that_was_not_offered_is_not_mapped(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    (offered,) = pair.theirs
    beyond = Memory(offered.address, offered.length_bytes + 16, "VRAM")
    other = inside(Allocation(pair.host, 4096).memory)
    for memory, mapped in ([offered], True), ([offered, beyond], False), ([other], False):
        assert pair.writer.maps("d/1", memory) == mapped


def test_a_write_without_a_word_says_nothing(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    write = pair.post(b"")
    assert pair.writer.release(write)
    assert pair.receiver.notifications() == []
    pair.writer.notify("d/1", b"alone")
    assert pair.receiver.notifications() == [("p", b"alone")]


def test_a_write_whose_word_cannot_be_sent_has_failed(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    write = pair.post()
    pair.network.kill("d/1")
    assert pair.writer.state(write) is WriteState.FAILED
    assert pair.writer.release(write)


def test_a_device_that_fails_fails_its_writes(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.refuses["done"] = "CUDA error 700"
    write = pair.post()
    assert pair.writer.state(write) is WriteState.FAILED
    assert pair.writer.release(write)
    assert "CUDA error 700" in caplog.text
    assert pair.receiver.notifications() == []


@pytest.mark.parametrize(
    ("source", "row", "stage", "reason"),
    [
        ("mine", (0, 0, 24), "post", "no multiples of 16"),
        ("mine", (2040, 0, 16), "post", "lies outside"),
        ("other", (0, 0, 16), "post", "not registered"),
    ],
)
def test_bad_writes_are_refused(
    source: str, row: tuple[int, int, int], stage: str, reason: str, pair: Pair
) -> None:
    pair.writer.connect(pair.receiver.metadata())
    span = pair.mine if source == "mine" else inside(Allocation(pair.host, 4096).memory)
    with pytest.raises(TransferError, match=reason) as caught:
        pair.writer.post_write("d/1", [Copies(span, pair.theirs[0], runs(row))], b"")
    assert caught.value.stage == stage
    assert not pair.device.copies


def test_a_copy_that_was_not_begun_is_not_posted(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.refuses["copy"] = "no event for copies"
    with pytest.raises(TransferError, match="d/1: no event for copies") as caught:
        pair.post()
    assert caught.value.stage == "post"
    pair.writer.disconnect("d/1")
    assert pair.device.closed == {pair.target.handle: 1}, "none is under way"


def test_other_memory_of_a_peer_goes_through_the_transport_inside(pair: Pair) -> None:
    """Such as what it registered after it had told of its memory."""
    pair.writer.connect(pair.receiver.metadata())
    late = Allocation(pair.host, 4096)
    pair.receiver.register([late.memory])
    write = pair.writer.post_write("d/1", [Copies(pair.mine, late.memory, runs((0, 0, 16)))], b"late")
    assert not pair.device.copies
    assert pair.receiver.notifications() == [("p", b"late")]
    assert pair.writer.state(write) is WriteState.DONE
    assert pair.writer.release(write)
    assert late.bytes[:17].tolist() == [*[7] * 16, 0]


@pytest.mark.parametrize("their_host", ["another host", ""])
@pytest.mark.parametrize("required", [False, True])
def test_nothing_is_mapped_on_another_host(
    their_host: str, required: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair(required=required, their_host=their_host)
    if required:
        with pytest.raises(TransferError, match="required, and of d/1: it is on another host") as caught:
            pair.writer.connect(pair.receiver.metadata())
        assert caught.value.stage == "handshake"
    else:
        pair.writer.connect(pair.receiver.metadata())
        assert "to d/1: it is on another host" in caplog.text
        write = pair.post()
        assert pair.receiver.notifications() == [("p", b"word")]
        assert pair.writer.release(write)
        pair.check_written()
    assert not pair.writer.maps("d/1")
    assert not pair.device.opened


def test_a_host_that_cannot_be_told_is_never_the_same() -> None:
    pair = Pair(their_host="")
    writer = pair.make_writer("q", "")
    writer.connect(pair.receiver.metadata())
    assert not writer.maps("d/1")
    assert host_identity() == host_identity() != ""


@pytest.mark.parametrize("required", [False, True])
def test_a_handle_that_cannot_be_opened_leaves_nothing_mapped(required: bool) -> None:
    pair = Pair(required=required)
    second = Allocation(pair.host, 4096)
    pair.theirs.append(inside(second.memory))
    receiver = pair.make_receiver("d/2")
    metadata = receiver.metadata()
    del pair.host.allocations[second.handle]
    opened = pair.device.open
    pair.device.open = lambda handle: opened(handle) if handle != second.handle else fail()  # type: ignore[method-assign]
    if required:
        with pytest.raises(TransferError, match="no such allocation"):
            pair.writer.connect(metadata)
    else:
        pair.writer.connect(metadata)
    assert not pair.writer.maps("d/2")
    assert pair.device.closed == pair.device.opened == {pair.target.handle: 1}


def fail() -> tuple[int, int | None]:
    raise RuntimeError("no such allocation")


def test_an_end_without_peer_memory_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair()
    off = pair.make_receiver("off", memory=None, obstacle="transfer.same_host is never")
    pair.writer.connect(off.metadata())
    assert "to off: transfer.same_host is never" in caplog.text
    writer = pair.make_writer("q", memory=None, obstacle="this GPU is of another kind")
    writer.connect(pair.receiver.metadata())
    assert "to d/1: this GPU is of another kind" in caplog.text
    assert not writer.maps("d/1")


@pytest.mark.parametrize("required", [False, True])
def test_memory_that_cannot_be_exported_is_not_offered(required: bool) -> None:
    pair = Pair(required=required)
    device = SharedMemoryDevice(pair.host)
    device.refuses["export"] = "expandable segments have no handle"
    receiver = pair.make_receiver("d/2", memory=device)
    if required:
        with pytest.raises(TransferError, match="expandable segments have no handle"):
            receiver.metadata()
        return
    pair.writer.connect(receiver.metadata())
    assert not pair.writer.maps("d/2")


def test_all_of_an_end_is_offered_or_nothing(pair: Pair) -> None:
    receiver = pair.make_receiver("d/2")
    receiver.register([Memory(16, 16)])
    pair.writer.connect(receiver.metadata())
    assert not pair.writer.maps("d/2")


def test_who_is_written_maps_nothing(pair: Pair) -> None:
    assert pair.receiver.connect(pair.writer.metadata()) == "p"
    assert not pair.receiver.maps("p")
    pair.receiver.notify("p", b"free")
    assert pair.writer.notifications() == [("d/1", b"free")]


def test_a_peer_is_mapped_once_and_unmapped_once(pair: Pair) -> None:
    """Two spans of one allocation, connected again as after a broken connection."""
    pair.theirs.append(Memory(pair.target.memory.address + 3000, 64, "VRAM"))
    receiver = pair.make_receiver("d/2")
    for _ in range(3):
        pair.writer.connect(receiver.metadata())
    assert pair.device.opened == {pair.target.handle: 1}
    pair.writer.release(pair.post(peer="d/2"))
    pair.check_written()
    pair.writer.disconnect("d/2")
    pair.writer.disconnect("d/2")
    assert pair.device.closed == {pair.target.handle: 1}
    assert not pair.writer.maps("d/2")
    with pytest.raises(TransferError, match="not connected"):
        pair.post(peer="d/2")


def test_memory_into_which_a_copy_is_under_way_stays_mapped(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.holds = True
    write = pair.post()
    pair.writer.disconnect("d/1")
    assert pair.writer.state(write) is WriteState.IN_PROGRESS
    assert not pair.device.closed
    pair.device.copies[0].let_go()
    assert pair.writer.state(write) is WriteState.FAILED, "its peer was disconnected"
    assert pair.writer.release(write)
    assert pair.device.closed == {pair.target.handle: 1}
    assert pair.receiver.notifications() == []


def test_a_peer_that_comes_back_is_still_mapped_and_its_old_write_has_failed(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.holds = True
    old = pair.post(b"old")
    pair.writer.disconnect("d/1")
    pair.writer.connect(pair.receiver.metadata())
    new = pair.post(b"new")
    for copy in pair.device.copies:
        copy.let_go()
    assert pair.writer.state(old) is WriteState.FAILED
    assert pair.writer.state(new) is WriteState.DONE
    assert pair.receiver.notifications() == [("p", b"new")]
    assert pair.device.opened == {pair.target.handle: 1}
    assert not pair.device.closed


def test_a_new_life_of_a_peer_is_mapped_beside_the_old_one(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.holds = True
    into_old = pair.post()
    pair.network.kill("d/1")
    again = Allocation(pair.host, 4096)
    pair.theirs = [inside(again.memory)]
    pair.writer.connect(pair.make_receiver("d/2").metadata())
    into_new = pair.post(peer="d/2")
    pair.writer.disconnect("d/1")
    for copy in pair.device.copies:
        copy.let_go()
    assert pair.writer.state(into_old) is WriteState.FAILED
    assert pair.writer.state(into_new) is WriteState.DONE
    assert pair.device.closed == {pair.target.handle: 1}
    assert pair.device.opened == {pair.target.handle: 1, again.handle: 1}


def test_other_memory_under_the_same_name_is_refused(pair: Pair) -> None:
    metadata = pair.receiver.metadata()
    pair.writer.connect(metadata)
    pair.receiver.register([Memory(pair.target.memory.address + 3000, 64, "VRAM")])
    with pytest.raises(TransferError, match="other memory than before") as caught:
        pair.writer.connect(pair.receiver.metadata())
    assert caught.value.stage == "handshake"


def test_an_end_unmaps_everything_but_what_is_being_written(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.writer.connect(pair.receiver.metadata())
    idle = Allocation(pair.host, 4096)
    busy, pair.theirs = pair.theirs, [inside(idle.memory)]
    pair.writer.connect(pair.make_receiver("d/2").metadata())
    pair.theirs, pair.device.holds = busy, True
    pair.post()
    pair.writer.close()
    assert pair.device.closed == {idle.handle: 1}
    assert "copies into d/1 were under way" in caplog.text


def test_memory_that_cannot_be_unmapped_is_told(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.writer.connect(pair.receiver.metadata())
    pair.device.refuses["close"] = "CUDA error 400"
    pair.writer.disconnect("d/1")
    assert "stays mapped: CUDA error 400" in caplog.text


def test_metadata_of_another_kind_is_a_handshake_error(pair: Pair) -> None:
    plain = InProcessTransport(pair.network, "p").metadata()
    with pytest.raises(TransferError, match="undecodable") as caught:
        pair.writer.connect(plain)
    assert caught.value.stage == "handshake"


@pytest.mark.parametrize(
    "change",
    [{"offset": -16}, {"offset": 2**62}, {"offset": 2**64 - 1}, {"address": -1}, {"address": 2**63}]
    + [{"length_bytes": size} for size in (0, -1, 2**63)],
)
def test_memory_that_cannot_be_is_not_mapped(change: dict[str, int], pair: Pair) -> None:
    said = msgspec.msgpack.decode(pair.receiver.metadata())
    said["offers"][0] |= change
    with pytest.raises(TransferError, match="memory that cannot be is offered") as caught:
        pair.writer.connect(msgspec.msgpack.encode(said))
    assert caught.value.stage == "handshake"
    assert not pair.device.opened


def test_transports_are_left_alone_where_no_gpus_meet(pair: Pair) -> None:
    plain = pair.network.transport
    assert with_same_host(plain, Side.WRITES, None) is plain
    writer = with_same_host(plain, Side.WRITES, Reach(pair.device))("q")
    receiver = with_same_host(plain, Side.IS_WRITTEN, Reach(SharedMemoryDevice(pair.host)))("d/2")
    receiver.register(pair.theirs)
    writer.connect(receiver.metadata())
    assert writer.maps("d/2"), "both are on the host that runs this"
