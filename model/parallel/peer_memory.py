"""Memory of one GPU that the other ranks' GPUs of the host can read and write: torch's symmetric memory.

Multicast is not used; where the environment allows it, whoever starts the process turns it off.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from antiphon.kernels.collectives.one_shot import OneShotReduce, peer_bytes
from antiphon.model.parallel.communicator import Communicator
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
    """``OneShotReduce`` with the memory it works on.

    Args:
        max_rows: up to here one launch is faster than a library's all-reduce and what follows it.
    """

    def __init__(
        self, store: Store, communicator: Communicator, max_rows: int, width: int, device: torch.device
    ) -> None:
        size_bytes = peer_bytes(max_rows, width, communicator.size)
        self._memory = PeerMemory(store, communicator, size_bytes, device)
        self._reduce = OneShotReduce(self._memory.addresses, communicator.rank, max_rows, width, device)
        self.max_rows = max_rows
        self.add_norm_ = self._reduce.add_norm_
