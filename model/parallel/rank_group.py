"""The ranks of one worker as processes of one host, joined through torch.distributed.

Tensors on a CPU travel over gloo, tensors on a GPU over NCCL. Small control messages always travel over gloo,
so a rank can wait for one without occupying its GPU. The groups are built for this object alone: nothing of
torch's global default group is used, and a process may hold several ranks in threads.

A rank that dies closes its connections, which its neighbours notice at once; one that hangs is noticed when
an operation exceeds the timeout. Either way the operation raises, and so does every one after it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from antiphon.model.parallel.communicator import Communicator, SingleRank
from antiphon.protocol.errors import ConfigError, RankLostError

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
"""Ranks of one worker share a host, so control messages and CPU tensors never leave it."""

ABORT_TIMEOUT_S = 5.0
"""Longest that leaving may take. NCCL's abort returns when all graphs are gone that hold its kernels; one
that runs stays, for ever where a kernel of ours waits in it for a rank that died."""


class _Collectives(Protocol):
    """What gloo's and NCCL's process groups have in common; torch types it for neither."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def _allgather_base(self, output: Tensor, input: Tensor) -> dist.Work: ...  # straight into one tensor
    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def abort(self) -> None: ...


def open_store(rank: int, size: int, *, host: str = LOOPBACK, port: int = 0, timeout_s: float = 60.0) -> Any:
    """Where ranks find each other: rank 0 listens, on a free port unless one is given, the others connect.

    Returns:
        A ``torch.distributed.TCPStore``; tell the other ranks its ``port``. Rank 0's does not wait for them.

    Raises:
        RankLostError: nobody listens there within the timeout, or the port is taken.
    """
    listener: int | None = None
    try:
        if rank == 0:
            # Left to itself the store would listen on every interface, and it asks nobody who they are.
            with socket.create_server((host, port)) as server:
                port = server.getsockname()[1]
                listener = server.detach()
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch forgets to export it in its types
            host,
            port,
            size,
            rank == 0,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (RuntimeError, OSError) as error:
        raise RankLostError(
            f"rank {rank} of {size}: no meeting place at {host}:{port}: {_reason(error)}"
        ) from error


class RankGroup:
    """This rank's connections to the others of its worker.

    Attributes:
        rank, size: this one of how many.
        timeout_s: an operation that takes longer means that another rank hangs.
        communicator: for tensors on the model's device.
        control: for small tensors on the CPU.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        communicator: Communicator,
        control: Communicator,
        timeout_s: float,
        load_timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self.communicator = communicator
        self.control = control

    @staticmethod
    def single() -> RankGroup:
        """A worker of one rank."""
        return RankGroup(0, 1, SingleRank(), SingleRank(), float("inf"), float("inf"))

    @staticmethod
    def join(
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 30.0,
        join_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
    ) -> RankGroup:
        """Connect to the others; returns when all are there.

        Args:
            store: the same one for all ranks, see ``open_store``.
            device: ``cpu``, or this rank's GPU.
            timeout_s: longest that an operation may take; more than the longest step, compilation included.
            join_timeout_s: longest that the others may take to appear.
            load_timeout_s: longest that they may take from there to ``agree``, which comes after loading.

        Raises:
            RankLostError: they did not appear.
        """
        if size == 1:
            return RankGroup.single()
        device = torch.device(device)
        try:
            store.set_timeout(timedelta(seconds=join_timeout_s))
            gloo = _gloo(store, rank, size, join_timeout_s)
            control = communicator = GroupCommunicator(gloo, rank, size)
            control.set_timeout(timeout_s)
            if device.type == "cuda":
                communicator = GroupCommunicator(_nccl(store, rank, size, device, timeout_s), rank, size)
        except RuntimeError as error:
            raise RankLostError(
                f"rank {rank} of {size}: the ranks did not all join within {join_timeout_s:g} s: "
                f"{_reason(error)}"
            ) from error
        return RankGroup(rank, size, communicator, control, timeout_s, load_timeout_s)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all ranks were given the same values; every rank calls this when it has loaded.

        Args:
            facts: what must be equal, by name; values that JSON can hold.

        Raises:
            ConfigError: rank 0's and another one's differ; the message has both values.
            RankLostError: another rank did not answer.
        """
        mine = torch.frombuffer(bytearray(json.dumps(facts, sort_keys=True).encode()), dtype=torch.uint8)
        sizes = self._after_loading(torch.tensor([mine.numel()])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        everyone = self.control.all_gather(padded)
        said = [json.loads(bytes(row[:n].tolist())) for row, n in zip(everyone, sizes, strict=True)]
        differences = [
            f"{name}: rank 0 has {said[0].get(name)!r}, rank {rank} has {other.get(name)!r}"
            for rank, other in enumerate(said)
            for name in sorted(said[0].keys() | other.keys())
            if said[0].get(name) != other.get(name)
        ]
        if differences:
            raise ConfigError("the ranks of a worker disagree: " + "; ".join(differences))

    def _after_loading(self, x: Tensor) -> Tensor:
        """An all_gather for which the slowest rank's checkpoint is waited."""
        if not isinstance(self.control, GroupCommunicator):
            return self.control.all_gather(x)
        self.control.set_timeout(self._load_timeout_s)
        try:
            return self.control.all_gather(x)
        finally:
            self.control.set_timeout(self.timeout_s)

    def close(self) -> None:
        """Leave: the others' operations fail from now on, and so do this one's. May be called twice.

        Control comes first: ending it waits for nothing, while on a GPU kernels may hold up the end, and the
        others, who wait for a command, would learn of it only then.
        """
        for end in (self.control, self.communicator):
            if isinstance(end, GroupCommunicator):
                end.close()


class GroupCommunicator:
    """A ``Communicator`` over one process group."""

    def __init__(self, collectives: _Collectives, rank: int, size: int) -> None:
        self._collectives: _Collectives | None = collectives
        self._rank = rank
        self._size = size
        self._lost: str | None = None

    @property
    def rank(self) -> int:
        """This one."""
        return self._rank

    @property
    def size(self) -> int:
        """All of them."""
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``. Both libraries compute each element once and hand it to everyone.

        Raises:
            RankLostError: another rank died or hangs.
        """
        x = x.contiguous()
        self._wait("all_reduce", self._live().allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``.

        Raises:
            RankLostError: another rank died or hangs.
        """
        x = x.contiguous()
        out = x.new_empty((self._size, *x.shape))
        self._wait("all_gather", self._live()._allgather_base(out.view(-1), x.view(-1)))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See ``Communicator``.

        Raises:
            RankLostError: another rank died or hangs.
        """
        x = x.contiguous()
        self._wait("broadcast", self._live().broadcast(x, 0))
        return x

    def set_timeout(self, timeout_s: float) -> None:
        """Longest that an operation may take from now on."""
        if self._collectives is not None:
            self._collectives.set_timeout(timedelta(seconds=timeout_s))

    def close(self, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Drop the connections; after the timeout that is left to the end of the process."""
        self._lost = self._lost or "this rank has left"
        if self._collectives is None:
            return
        collectives, self._collectives = self._collectives, None
        ending = threading.Thread(target=self._abort, args=(collectives,), name="rank-abort", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            _log.warning(
                "rank %d of %d: the connections did not end within %g s", self._rank, self._size, timeout_s
            )

    def _abort(self, collectives: _Collectives) -> None:
        """NCCL: ends kernels that wait for others; gloo closes when it is freed."""
        try:
            collectives.abort()
        except RuntimeError as error:  # there is no more to leave than what this process' end takes with it
            _log.warning(
                "rank %d of %d: the connections did not end: %s", self._rank, self._size, _reason(error)
            )

    def _live(self) -> _Collectives:
        if self._lost is not None or self._collectives is None:
            raise RankLostError(f"rank {self._rank} of {self._size}: {self._lost}")
        return self._collectives

    def _wait(self, operation: str, work: dist.Work) -> None:
        begin = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            self._lost = f"{operation} failed after {time.monotonic() - begin:.1f} s: {_reason(error)}"
            raise RankLostError(f"rank {self._rank} of {self._size}: {self._lost}") from error


def _gloo(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # the only way to name the interface without an environment variable
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(PrefixStore("gloo", store), rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = nccl(PrefixStore("nccl", store), rank, size, options)
    with torch.cuda.device(device):  # connect now, not within the first step
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return group


def _reason(error: Exception) -> str:
    """A library's message without the place in its source that leads it and the advice that follows."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if first.startswith("["):
        first = first.partition("] ")[2] or first
    return first.partition(". ")[0].rstrip(".")
