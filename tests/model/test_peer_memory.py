"""How ranks come by each other's memory, with a device that only keeps books; a rank is a thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from antiphon.kernels.ipc.memory import IpcMemoryError
from antiphon.model.parallel import peer_memory
from antiphon.model.parallel.peer_memory import PeerMemory
from antiphon.model.parallel.reduce_limits import ReduceLimits
from antiphon.protocol.errors import RankLostError

T = TypeVar("T")


class Host:
    """What all devices of a host hold: handle -> its rank, and who has it open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: dict[bytes, int] = {}
        self.open: set[tuple[int, bytes]] = set()
        self.freed: list[bytes] = []
        self.numbers = itertools.count(1)


class Device:
    """One rank's; no address is there twice, as if no two devices saw a thing at the same place."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank = host, rank
        self.handles: dict[int, bytes] = {}
        self.refuses: dict[str, str] = {}

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        self._refuse("allocate")
        with self.host.lock:
            number = next(self.host.numbers)
            handle = number.to_bytes(2, "little") * 32  # bytes that no text holds
            self.host.owner[handle] = self.rank
            self.handles[number * 256] = handle
        return number * 256, handle

    def open(self, handle: bytes) -> int:
        self._refuse("open")
        with self.host.lock:
            assert self.host.owner[handle] != self.rank, "CUDA opens no memory of the same process"
            self.host.open.add((self.rank, handle))
            address = next(self.host.numbers) * 256
            self.handles[address] = handle
        return address

    def close(self, address: int) -> None:
        with self.host.lock:
            self.host.open.remove((self.rank, self.handles.pop(address)))

    def free(self, address: int) -> None:
        with self.host.lock:
            handle = self.handles.pop(address)
            assert self.host.owner[handle] == self.rank
            assert not [rank for rank, opened in self.host.open if opened == handle], "freed under a peer"
            self.host.freed.append(handle)

    def _refuse(self, what: str) -> None:
        if what in self.refuses:
            raise IpcMemoryError(self.refuses[what])


def new_store(timeout_s: float) -> Store:
    store: Store = dist.HashStore()  # type: ignore[attr-defined]  # torch forgets to export it in its types
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class Ranks:
    """Every rank of a host."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.host, self.store = size, Host(), new_store(timeout_s)
        self.devices = [Device(self.host, rank) for rank in range(size)]

    def make(self, rank: int) -> PeerMemory:
        return PeerMemory(self.store, rank, self.size, 1000, self.devices[rank])

    def at_once(self, call: Callable[[int], T], ranks: range | None = None) -> list[T | RankLostError]:
        """What each rank got, or raised."""

        def one(rank: int) -> T | RankLostError:
            try:
                return call(rank)
            except RankLostError as error:
                return error

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, ranks or range(self.size)))


def made(found: list[PeerMemory | RankLostError]) -> list[PeerMemory]:
    for each in found:
        if isinstance(each, RankLostError):
            raise each
    return [each for each in found if isinstance(each, PeerMemory)]


def test_every_rank_sees_the_memory_of_every_rank_at_its_place() -> None:
    """Twice over one store: a second piece of memory is not taken for the first."""
    ranks = Ranks(4)
    seen: set[bytes] = set()
    for _ in range(2):
        by_rank = made(ranks.at_once(ranks.make))
        handles = [
            [ranks.devices[rank].handles[address] for address in memory.addresses]
            for rank, memory in enumerate(by_rank)
        ]
        assert handles[1:] == handles[:-1]
        assert [ranks.host.owner[handle] for handle in handles[0]] == [0, 1, 2, 3]
        assert not seen & set(handles[0])
        seen |= set(handles[0])
    assert len(ranks.host.open) == 2 * 4 * 3


def test_memory_is_freed_when_everybody_has_closed_it() -> None:
    ranks = Ranks(3)
    memory = made(ranks.at_once(ranks.make))
    assert ranks.at_once(lambda rank: memory[rank].close()) == [True] * 3
    assert not ranks.host.open
    assert sorted(ranks.host.freed) == sorted(ranks.host.owner)
    assert memory[0].close(), "a second time"


def test_a_rank_that_never_closes_is_not_waited_for_for_ever() -> None:
    """Its mapping may still be read: nothing is freed under it."""
    ranks = Ranks(2)
    memory = made(ranks.at_once(ranks.make))
    begin = time.monotonic()
    assert not memory[0].close(timeout_s=0.2)
    assert time.monotonic() - begin < 60
    assert ranks.host.freed == []
    assert {rank for rank, _ in ranks.host.open} == {1}


def test_a_rank_that_never_comes_is_named_within_the_stores_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    said, say = threading.Barrier(2), peer_memory._Words.say

    def say_before_anybody_listens(words: Any, what: str, data: str = "") -> None:
        say(words, what, data)
        said.wait(60)

    monkeypatch.setattr(peer_memory._Words, "say", say_before_anybody_listens)
    ranks = Ranks(3, timeout_s=0.5)
    begin = time.monotonic()
    errors = ranks.at_once(ranks.make, range(2))
    assert time.monotonic() - begin < 60
    assert [str(error).partition(" for memory")[0] for error in errors] == [
        f"rank {rank} of 3: rank 2 did not say 'handle'" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("allocate", "rank 1 of 3: no memory for the other ranks: out of memory"),
        ("open", "rank 1 of 3: the memory of rank 0 cannot be reached: out of memory"),
    ],
)
def test_what_one_rank_fails_with_all_raise(what: str, said: str) -> None:
    """At once, not when they have waited long enough; and nothing of theirs stays open."""
    ranks = Ranks(3, timeout_s=200.0)
    ranks.devices[1].refuses[what] = "out of memory"
    begin = time.monotonic()
    errors = ranks.at_once(ranks.make)
    assert time.monotonic() - begin < 60
    assert all(isinstance(error, RankLostError) for error in errors)
    reason = said.partition(": ")[2]
    assert [str(error) for error in errors] == [
        f"rank 0 of 3: rank 1 failed: {reason}",
        said,
        f"rank 2 of 3: rank 1 failed: {reason}",
    ]
    assert not ranks.host.open
    assert ranks.host.freed == []


def test_one_rank_needs_nobody() -> None:
    ranks = Ranks(1)
    memory = ranks.make(0)
    assert memory.addresses == (256,)
    assert memory.close()
    assert len(ranks.host.freed) == 1


def test_the_number_of_rows_alone_chooses_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way has memory of its own, of the size that the check of a deployment counts."""
    shared: list[int] = []

    class Shared:
        def __init__(self, store: object, rank: int, size: int, size_bytes: int, memory: object) -> None:
            shared.append(size_bytes)
            self.addresses = (256,) * size

    class Way:
        def __init__(self, memory: object, rank: int, max_rows: int, width: int, device: object) -> None:
            self.max_rows = max_rows

        def add_norm_(self, x: torch.Tensor, *rest: object) -> str:
            return type(self).__name__

    monkeypatch.setattr(peer_memory, "PeerMemory", Shared)
    monkeypatch.setattr(peer_memory, "CudaIpcMemory", lambda device: None)
    for name in ("OneShotReduce", "TwoShotReduce"):
        monkeypatch.setattr(peer_memory, name, type(name, (Way,), {}))

    def taken(limits: ReduceLimits, rows: int) -> str:
        ranks: Any = SimpleNamespace(rank=0, size=2)
        store: Any = None
        shared.clear()
        reduce = peer_memory.FusedReduce(store, ranks, limits, 64, torch.device("cuda"))
        assert reduce.max_rows == limits.max_rows
        assert sum(shared) == limits.shared_bytes(64, 2)
        x = torch.zeros(rows, 64)
        return str(reduce.add_norm_(x, x, x[0], 1e-5))

    both = ReduceLimits(4, 16)
    ways = {
        1: "OneShotReduce",
        4: "OneShotReduce",
        5: "TwoShotReduce",
        16: "TwoShotReduce",
    }
    assert {rows: taken(both, rows) for rows in ways} == ways
    assert taken(ReduceLimits(0, 16), 1) == "TwoShotReduce"
    with pytest.raises(ValueError, match="17 rows, the memory is for 1 to 16"):
        taken(both, 17)
