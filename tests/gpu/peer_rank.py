"""One rank of ``test_peer_memory_cuda``, as a process: sums over peer memory, launched, replayed, repeated.

Told by its arguments: rank, ranks, port of rank 0's store. Ends with an error when a sum is wrong.
"""

from __future__ import annotations

import sys

import torch
from repeated import check_launches, compare_launches
from torch import Tensor

from antiphon.kernels.collectives.one_shot import OneShotReduce, peer_bytes
from antiphon.kernels.collectives.two_shot import TwoShotReduce, two_shot_bytes
from antiphon.kernels.ipc.memory import CudaIpcMemory
from antiphon.model.parallel.peer_memory import PeerMemory
from antiphon.model.parallel.rank_group import open_store

WIDTH, REPLAYS = 2880, 300
MAX_ROWS = 8192
"""More than a device has blocks for at one time."""


def parts_of(rank: int, rows: int) -> Tensor:
    """[rows, width]: small whole numbers, whose sums bf16 holds exactly, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + rows)
    return torch.randint(-4, 5, (rows, WIDTH), generator=generator).bfloat16()


def check(reduce: OneShotReduce | TwoShotReduce, rank: int, ranks: int, rows: int) -> None:
    """Launch once, then from a graph again and again, with other numbers every time.

    Columns move on by one from sum to sum, so rows of another launch would be seen.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    part, weight = parts_of(rank, rows).to(device), torch.ones(WIDTH, device=device).bfloat16()
    total = torch.stack([parts_of(each, rows).float() for each in range(ranks)]).sum(0).to(device)
    residual = torch.zeros_like(part)
    reduce.add_norm_(part, residual, weight, 1e-5)
    assert torch.equal(residual.float(), total)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        part.copy_(part.roll(1, dims=1))
        total.copy_(total.roll(1, dims=1))
        residual.zero_()
        reduce.add_norm_(part, residual, weight, 1e-5)
        wrong.add_((residual.float() != total).sum())
    for _ in range(REPLAYS):
        graph.replay()
    assert int(wrong) == 0


def check_repeats(reduce: OneShotReduce | TwoShotReduce, rank: int, rows: int, beside: bool) -> None:
    """Back to back, of numbers whose sums are rounded: every launch leaves the same residual and norm."""
    generator = torch.Generator().manual_seed(2000 * rank + rows)
    parts = torch.randn(2, rows, WIDTH, generator=generator).bfloat16().cuda()
    residual = torch.randn(rows, WIDTH, generator=generator).bfloat16().cuda()
    weight = torch.rand(WIDTH, generator=generator).bfloat16().cuda()
    normed = []

    def launch(turn: int, residual: Tensor) -> None:
        normed.append(reduce.add_norm_(parts[turn], residual, weight, 1e-5))

    check_launches(launch, residual, beside=beside)
    compare_launches(torch.stack(normed))


def main(rank: int, ranks: int, port: int) -> None:
    """All rows, every way, and the memory given back."""
    device = torch.device("cuda", rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    store = open_store(rank, ranks, port=port)
    on_device = CudaIpcMemory(device)
    sizes = [of(MAX_ROWS, WIDTH, ranks) for of in (peer_bytes, two_shot_bytes)]
    memory = [PeerMemory(store, rank, ranks, size, on_device) for size in sizes]
    ways = (
        OneShotReduce(memory[0].addresses, rank, MAX_ROWS, WIDTH, device),
        TwoShotReduce(memory[1].addresses, rank, MAX_ROWS, WIDTH, device),
    )
    for rows in (1, 3, 64, 512, MAX_ROWS):
        for way in ways:
            check(way, rank, ranks, rows)
            for beside in (False, True):
                check_repeats(way, rank, rows, beside)
    torch.cuda.synchronize()
    assert [each.close() for each in memory] == [True] * 2
    store.set(f"done-{rank}", "")
    if rank == 0:  # it has the store
        store.wait([f"done-{each}" for each in range(ranks)])
    print(f"rank {rank} on {device} of {torch.cuda.device_count()}: sums are right, memory is closed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
