"""Memory of one GPU that the other ranks' GPUs of the host can read and write: torch's symmetric memory.

Multicast is not used; where the environment allows it, whoever starts the process turns it off.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from antiphon.kernels.collectives.one_shot import OneShotReduce, peer_bytes
from antiphon.kernels.collectives.two_shot import TwoShotReduce, two_shot_bytes
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.reduce_limits import ReduceLimits
from antiphon.protocol.errors import RankLostError

_names = itertools.count()


class PeerMemory:
    """Bytes of every rank, seen from this one.

    Args:
        store: the same for all ranks, which find each other's memory through it.
        communicator: of the ranks; used once, so that nobody writes before everybody has zeroed its own.

    Raises:
        RankLostError: the ranks' GPUs cannot reach each other, or a rank did not come.
    """

    def __init__(
        self, store: Store, communicator: Communicator, size_bytes: int, device: torch.device
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        symmetric: Any = _SymmetricMemory
        name = f"antiphon-peer-memory-{next(_names)}"
        rank, size = communicator.rank, communicator.size
        try:
            symmetric.set_group_info(name, rank, size, PrefixStore(name, store))
            self._tensor = symmetric.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device, name)
            self._tensor.zero_()
            self._handle = symmetric.rendezvous(self._tensor)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} of {size}: no memory in common: {error}") from error
        # The tensor may begin behind the allocation that is shared.
        begin = self._tensor.data_ptr() - int(self._handle.buffer_ptrs[rank])
        self.addresses: tuple[int, ...] = tuple(int(base) + begin for base in self._handle.buffer_ptrs)
        communicator.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize(device)


class FusedReduce:
    """Sum over ranks, residual and norm in one launch, one-shot or two-shot by the number of rows.

    Which, and up to how many rows, ``limits`` says; all ranks decide alike, by the number of rows alone.
    """

    def __init__(
        self, store: Store, communicator: Communicator, limits: ReduceLimits, width: int, device: torch.device
    ) -> None:
        """Raises RankLostError, see ``PeerMemory``."""
        self.max_rows = limits.max_rows
        rank, ranks = communicator.rank, communicator.size
        self._one_shot_rows = limits.one_shot_rows
        self._memory: list[PeerMemory] = []

        def shared(size_bytes: int) -> tuple[int, ...]:
            self._memory.append(PeerMemory(store, communicator, size_bytes, device))
            return self._memory[-1].addresses

        self._one_shot: OneShotReduce | None = None
        self._two_shot: TwoShotReduce | None = None
        if rows := limits.one_shot_rows:
            memory = shared(peer_bytes(rows, width, ranks))
            self._one_shot = OneShotReduce(memory, rank, rows, width, device)
        if rows := limits.two_shot_rows:
            memory = shared(two_shot_bytes(rows, width, ranks))
            self._two_shot = TwoShotReduce(memory, rank, rows, width, device)

    def add_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``OneShotReduce.add_norm_``; at most ``max_rows`` rows."""
        way = self._one_shot if x.shape[0] <= self._one_shot_rows else self._two_shot
        if way is None:
            raise ValueError(f"{x.shape[0]} rows, the memory is for 1 to {self.max_rows}")
        return way.add_norm_(x, residual, weight, eps)
