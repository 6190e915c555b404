"""No copy is launched that leaves memory which is there: an illegal address would end the writer's GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from mapped_ends import Pair, inside, runs
from shared_memory_device import Allocation

from antiphon.engine import kv_mapping
from antiphon.kernels.ipc.memory import IpcMemoryError
from antiphon.kv_transfer.handshake import PeerKv, RankPages
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.transport import Copies, Memory, WriteState
from antiphon.protocol.errors import HandshakeError, TransferError

MOST = 2**63 - 16
"""The highest number of a run that is a multiple of 16."""


@pytest.fixture
def pair() -> Pair:
    return Pair()


def offered(pair: Pair, **changes: int) -> bytes:
    """Metadata of the receiver with other numbers in its first offer."""
    said = msgspec.msgpack.decode(pair.receiver.metadata())
    said["offers"][0] |= changes
    return msgspec.msgpack.encode(said)


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"offset": 2048 + 16}, {"offset": 2**61}, {"length_bytes": 4096 - 512 + 16}, {"length_bytes": 2**61}],
)
def test_memory_beyond_its_allocation_is_refused_and_not_kept(change: dict[str, int], required: bool) -> None:
    """By the size that the writer's device says, whatever the peer does."""
    pair = Pair(required=required)
    with pytest.raises(TransferError, match=r"d/1: .* bytes at \d+ of an allocation of 4096") as caught:
        pair.writer.connect(offered(pair, **change))
    assert caught.value.stage == "handshake"
    assert pair.device.opened == pair.device.closed == {pair.target.handle: 1}
    assert not pair.writer.maps("d/1")
    pair.writer.connect(pair.receiver.metadata())
    assert pair.writer.maps("d/1"), "what it says next is heard"


def test_each_span_is_held_to_its_own_allocation(pair: Pair) -> None:
    small = Allocation(pair.host, 1024)
    pair.theirs.append(Memory(small.memory.address, 1024, "VRAM"))
    receiver = pair.make_receiver("d/2")
    said = msgspec.msgpack.decode(receiver.metadata())
    said["offers"][1]["length_bytes"] = 2048  # as much as the first one has
    with pytest.raises(TransferError, match="2048 bytes at 0 of an allocation of 1024"):
        pair.writer.connect(msgspec.msgpack.encode(said))
    assert pair.device.opened == pair.device.closed == {pair.target.handle: 1, small.handle: 1}


def test_memory_up_to_the_end_of_its_allocation_is_mapped(pair: Pair) -> None:
    pair.theirs = [pair.target.memory]
    pair.writer.connect(pair.make_receiver("d/2").metadata())
    write = pair.writer.post_write(
        "d/2", [Copies(pair.mine, pair.target.memory, runs((0, 4096 - 16, 16)))], b""
    )
    assert pair.writer.state(write) is WriteState.DONE
    assert pair.target.bytes.tolist() == [0] * (4096 - 16) + [7] * 16


def test_a_device_that_tells_no_sizes_maps_what_is_offered(pair: Pair) -> None:
    pair.device.tells_sizes = False
    pair.writer.connect(pair.receiver.metadata())
    pair.writer.release(pair.post())
    pair.check_written()


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize(
    ("offset", "length"),
    [(2048, 16), (2032, 32), (-16, 16), (0, 0), (0, -16), (0, 4096), (MOST, 16), (16, MOST), (MOST, MOST)],
)
def test_a_run_that_leaves_its_span_fails_its_write_alone(
    offset: int, length: int, side: str, pair: Pair
) -> None:
    """Also where the sum of offset and length passes 64 bits."""
    pair.writer.connect(pair.receiver.metadata())
    row = (offset, 0, length) if side == "source" else (0, offset, length)
    bad = Copies(pair.mine, pair.theirs[0], runs((0, 0, 16), row))
    with pytest.raises(TransferError, match=r"d/1: \w+ of run .* lies outside the 2048") as caught:
        pair.writer.post_write("d/1", [bad], b"")
    assert caught.value.stage == "post"
    assert str(list(row)) in caught.value.reason
    assert not pair.device.copies
    assert not pair.target.bytes.any()
    pair.writer.release(pair.post())
    pair.check_written()


def test_a_run_of_no_whole_words_fails_its_write_alone(pair: Pair) -> None:
    pair.writer.connect(pair.receiver.metadata())
    for row in ((8, 0, 16), (0, 8, 16), (0, 0, 8)):
        with pytest.raises(TransferError, match=r"d/1: .*no multiples of 16"):
            pair.writer.post_write("d/1", [Copies(pair.mine, pair.theirs[0], runs(row))], b"")
    assert not pair.device.copies


def test_pages_that_are_named_twice_are_refused() -> None:
    span = inside(Memory(4096, 4096))
    kv = PeerKv("decode-0", 1, (RankPages(Shard(1, 0), "d/1/0", {"full": span}, {"full": 9}),))
    kv.check_pages({"full": [3, 0, 8], "sliding": []})
    with pytest.raises(HandshakeError, match=r"full pages \[3, 8\] of decode-0 more than once"):
        kv.check_pages({"full": [8, 3, 0, 8, 3]})


def test_a_size_that_the_driver_does_not_say_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Memories:
        size: Callable[[int], int] = staticmethod(lambda address: 4096)

        def open(self, handle: bytes) -> int:
            return 512

    memory: Any = Memories()
    monkeypatch.setattr(kv_mapping, "CudaIpcMemory", lambda device: memory)
    monkeypatch.setattr(kv_mapping, "RunCopier", lambda device, blocks: SimpleNamespace())
    mapping = kv_mapping.KvMapping(SimpleNamespace())  # type: ignore[arg-type]
    assert mapping.open(b"a handle") == (512, 4096)
    assert not caplog.text

    def says_nothing(address: int) -> int:
        raise IpcMemoryError(f"size of what lies at {address:#x}: invalid argument")

    memory.size = says_nothing
    assert mapping.open(b"a handle") == (512, None)
    assert "taken at its word" in caplog.text
    assert "0x200: invalid argument" in caplog.text
