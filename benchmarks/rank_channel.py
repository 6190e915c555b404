"""What it costs that rank 0 tells other ranks what to compute, on CPUs: gloo over loopback.

A decode step of 8 sequences as gpt-oss-20b has it: one command with its batch, the all-reduce of 8 hidden
states (twice a layer), and the gathering of 8 rows of logits. Ranks are processes of this machine.

    python -m antiphon.benchmarks.rank_channel --out benchmarks/results/rank_channel.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from antiphon.benchmarks.records import checkout_commit, now, this_machine, write_json
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import preset
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.batch_wire import BatchSizes, pack
from antiphon.model.parallel.commands import Command, CommandChannel
from antiphon.model.parallel.rank_group import RankGroup, open_store

SEQUENCES, PAGES = 8, 64
ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Figures:
    """One operation on one number of ranks, seen by rank 0; microseconds."""

    operation: str
    ranks: int
    smallest_us: float
    median_us: float


def decode_batch() -> ForwardBatch:
    """One token of each of 8 sequences with 64 pages."""
    tokens = torch.zeros(SEQUENCES, dtype=torch.int64)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32)
    pages = PagedSequences(
        torch.zeros(SEQUENCES, PAGES, dtype=torch.int32), starts, starts[1:].clone(), tokens
    )
    return ForwardBatch(tokens, tokens, pages, pages)


def operations(group: RankGroup) -> dict[str, Callable[[], object]]:
    """What is timed, by name; every rank calls the same."""
    config = preset("gpt-oss-20b")
    channel = CommandChannel(group.control)
    batch = decode_batch()
    sizes = BatchSizes.of(batch)
    hidden = torch.zeros(SEQUENCES, config.hidden_size, dtype=torch.bfloat16)
    logits = torch.zeros(SEQUENCES, config.vocab_size // group.size, dtype=torch.bfloat16)

    def command() -> None:
        if group.rank == 0:
            packed = pack(batch)
            channel.send(Command.FORWARD, sizes.tokens, sizes.sequences)
        else:
            channel.receive()
            packed = torch.empty(sizes.total_bytes, dtype=torch.uint8)
        group.communicator.broadcast(packed)

    return {
        "command and batch": command,
        "all_reduce of hidden states": lambda: group.communicator.all_reduce(hidden),
        "all_gather of logits": lambda: group.communicator.all_gather(logits),
    }


def run_rank(rank: int, ranks: int, port: int, answer: Connection) -> None:
    """One rank's whole life; rank 0 answers with its port and then with its figures."""
    torch.set_num_threads(1)
    store = open_store(rank, ranks, port=port)
    if rank == 0:
        answer.send(store.port)
    group = RankGroup.join(store, rank, ranks)
    figures = []
    for name, operation in operations(group).items():
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            operation()
            times.append((time.perf_counter() - begin) * 1e6)
        figures.append(Figures(name, ranks, round(min(times), 1), round(statistics.median(times), 1)))
    group.close()
    if rank == 0:
        answer.send(figures)


def measure(ranks: int) -> list[Figures]:
    """Figures of one number of ranks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes = [context.Process(target=run_rank, args=(0, ranks, 0, there))]
    processes[0].start()
    port = here.recv()
    for rank in range(1, ranks):
        processes.append(context.Process(target=run_rank, args=(rank, ranks, port, there)))
        processes[-1].start()
    figures: list[Figures] = here.recv()
    for process in processes:
        process.join()
    return figures


def main() -> None:
    """Measure 2 and 4 ranks, print, and write when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    figures = [each for ranks in (2, 4) for each in measure(ranks)]
    for each in figures:
        print(f"{each.ranks} ranks  {each.operation:30} {each.smallest_us:9.1f} {each.median_us:9.1f} us")
    if options.out:
        origin = {"commit": checkout_commit(), "date": now(), "machine": this_machine()}
        document = {**origin, "load_average_before": round(load, 2), "rounds": ROUNDS}
        write_json(options.out, {**document, "figures": [asdict(each) for each in figures]})


if __name__ == "__main__":
    main()
