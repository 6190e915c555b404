"""Memory of one GPU that the other ranks' GPUs of the host can read and write, over CUDA IPC.

Ranks are processes: none can open what it allocated itself. Each may see its own GPU only.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from antiphon.kernels.collectives.one_shot import OneShotReduce, peer_bytes
from antiphon.kernels.collectives.two_shot import TwoShotReduce, two_shot_bytes
from antiphon.kernels.ipc.memory import CudaIpcMemory, IpcMemory, IpcMemoryError
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.reduce_limits import ReduceLimits
from antiphon.protocol.errors import RankLostError

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""How long a rank that ends waits for the others to close its memory; then its process' end does it."""


class PeerMemory:
    """Bytes of every rank, seen from this one; zero on every rank when any rank has this object.

    Every rank makes its own in the same order. What one fails with the others raise too, since a kernel would
    wait for its word for ever.

    Args:
        store: the same for all ranks; its timeout is how long they may take to come.
        rank, size: this one of how many.
        size_bytes: of each rank.
        memory: this rank's device.

    Attributes:
        addresses: by rank, where its bytes lie here; multiples of 256.

    Raises:
        RankLostError: a rank did not come, or one's GPU cannot reach another's; with CUDA's reason.
    """

    def __init__(self, store: Store, rank: int, size: int, size_bytes: int, memory: IpcMemory) -> None:
        self._memory = memory
        self._words = _Words(store, rank, size)
        self._open: dict[int, int] = {}
        try:
            self._own, handle = memory.allocate(size_bytes)
        except IpcMemoryError as error:
            raise self._words.failed("handle", f"no memory for the other ranks: {error}") from error
        self._words.say("handle", handle.hex())
        try:
            # A handle is given out once its memory is zero, so nobody's zeros come late.
            self._open_all(self._words.hear("handle"))
            self._words.say("opened")
            self._words.hear("opened")
        except RankLostError:
            self._close_opened()  # the own bytes stay: another rank may have them open
            raise
        self.addresses: tuple[int, ...] = tuple(self._open.get(peer, self._own) for peer in range(size))

    def _open_all(self, handles: dict[int, str]) -> None:
        for peer, handle in handles.items():
            try:
                self._open[peer] = self._memory.open(bytes.fromhex(handle))
            except IpcMemoryError as error:
                reason = f"the memory of rank {peer} cannot be reached: {error}"
                raise self._words.failed("opened", reason) from error

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Close the others' memory, then free this rank's once they all have closed it. May be called twice.

        Nothing that uses the memory may be running on this rank's GPU or come later.

        Returns:
            False when another rank did not close within the time: this process' end gives the memory back.

        Raises:
            RankLostError: CUDA did not close or free, for a reason that something on the device met before.
        """
        if not self.addresses:
            return True
        self.addresses = ()
        try:
            self._close_opened()
            if not self._all_closed(timeout_s):
                return False
            self._memory.free(self._own)
        except IpcMemoryError as error:
            raise RankLostError(f"memory in common does not close: {error}") from error
        return True

    def _all_closed(self, timeout_s: float) -> bool:
        try:
            self._words.say("closed")
            self._words.hear("closed", timeout_s)
        except RankLostError as error:
            _log.info("memory of other ranks is kept to the end of the process: %s", error)
            return False
        return True

    def _close_opened(self) -> None:
        while self._open:
            self._memory.close(self._open.popitem()[1])


class _Words:
    """What ranks tell each other about one piece of memory, through their store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._timeout_s = _timeout_s(store)
        try:
            number = store.add(f"antiphon-peer-memory/of-{rank}", 1)  # ranks may be threads of one process
        except RuntimeError as error:
            raise self._lost(f"the ranks' store is gone: {error}") from error
        self._store = PrefixStore(f"antiphon-peer-memory/{number}", store)

    def say(self, what: str, data: str = "") -> None:
        """Tell every other rank.

        Raises:
            RankLostError: the store is gone.
        """
        self._put(what, f"+{data}")

    def failed(self, what: str, reason: str) -> RankLostError:
        """Tell every other rank why they wait in vain; what this one raises."""
        self._put(what, f"-{reason}")
        return self._lost(reason)

    def hear(self, what: str, timeout_s: float | None = None) -> dict[int, str]:
        """Every other rank's word.

        Raises:
            RankLostError: one said that it failed, or nothing within the time; the message names it.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        heard: dict[int, str] = {}
        for peer in (each for each in range(self._size) if each != self._rank):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                self._store.wait([f"{what}-{peer}"], left)
                word = self._store.get(f"{what}-{peer}").decode(errors="replace")
            except RuntimeError as error:
                raise self._lost(f"rank {peer} did not say {what!r} for memory in common: {error}") from error
            if not word.startswith("+"):
                raise self._lost(f"rank {peer} failed: {word[1:]}")
            heard[peer] = word[1:]
        return heard

    def _put(self, what: str, word: str) -> None:
        try:
            self._store.set(f"{what}-{self._rank}", word)
        except RuntimeError as error:
            raise self._lost(f"the ranks' store is gone: {error}") from error

    def _lost(self, reason: str) -> RankLostError:
        return RankLostError(f"rank {self._rank} of {self._size}: {reason}")


def _timeout_s(store: Store) -> float:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's types lack it
    return timeout.total_seconds()


class FusedReduce:
    """Sum over ranks, residual and norm in one launch, in one of two ways by the number of rows.

    Which, and up to how many rows, ``limits`` says; all ranks decide alike, by the number of rows alone.

    Sums must follow one another on a rank's device, launched or replayed, whatever the stream: they use the
    same memory in turn.
    """

    def __init__(
        self, store: Store, communicator: Communicator, limits: ReduceLimits, width: int, device: torch.device
    ) -> None:
        """Raises RankLostError, see ``PeerMemory``."""
        self.max_rows = limits.max_rows
        rank, ranks = communicator.rank, communicator.size
        self._device = device
        self._memory: list[PeerMemory] = []
        on_device = CudaIpcMemory(device)

        def shared(size_bytes: int) -> tuple[int, ...]:
            self._memory.append(PeerMemory(store, rank, ranks, size_bytes, on_device))
            return self._memory[-1].addresses

        self._ways: list[OneShotReduce | TwoShotReduce] = []
        if rows := limits.one_shot_rows:
            memory = shared(peer_bytes(rows, width, ranks))
            self._ways.append(OneShotReduce(memory, rank, rows, width, device))
        if rows := limits.two_shot_rows:
            memory = shared(two_shot_bytes(rows, width, ranks))
            self._ways.append(TwoShotReduce(memory, rank, rows, width, device))

    def add_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
    ) -> Tensor:
        """See ``OneShotReduce.add_norm_``; at most ``max_rows`` rows. Sums in two shots never overlap."""
        way = next((way for way in self._ways if x.shape[0] <= way.max_rows), None)
        if way is None:
            raise ValueError(f"{x.shape[0]} rows, the memory is for 1 to {self.max_rows}")
        if isinstance(way, OneShotReduce):
            return way.add_norm_(x, residual, weight, eps, overlap)
        return way.add_norm_(x, residual, weight, eps)

    def close(self) -> None:
        """Give the memory back, see ``PeerMemory.close``; every rank calls this, after its last sum.

        What the default stream holds is waited for for a while only: a sum may wait there for a lost rank,
        and the memory is then left to the end of the process. Graphs that hold sums are not to be replayed.
        """
        self._ways.clear()
        if not _ended(torch.cuda.default_stream(self._device), CLOSE_TIMEOUT_S):
            _log.info("memory of other ranks is kept to the end of the process: a step has not ended")
            return
        for memory in self._memory:
            memory.close()


def _ended(stream: torch.cuda.Stream, timeout_s: float) -> bool:
    """Whether all that was issued on a stream is done within the time."""
    event, deadline = stream.record_event(), time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
