"""One rank of a measurement over several ranks, as a process: GPUs over NCCL, or a CPU over gloo."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from antiphon.benchmarks.records import Layout, Record, append_records, checkout_commit, now
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.peer_memory import FusedReduce
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.parallel.reduce_limits import ReduceLimits


class Rank:
    """One rank's process: its group, and where its records go."""

    def __init__(self, rank: int, options: argparse.Namespace, port: int) -> None:
        torch.manual_seed(0)  # the same numbers on every rank
        self.rank, self.size = rank, int(options.ranks)
        self.fast = options.device == "cuda"
        self.device = torch.device("cuda", rank) if self.fast else torch.device("cpu")
        if self.fast:
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        self.store = open_store(rank, self.size, port=port)
        self.group = RankGroup.join(self.store, rank, self.size, device=self.device, timeout_s=300.0)
        self.store.set_timeout(timedelta(seconds=300))  # one rank may compile what the others do not need
        self.records: list[Record] = []
        self._fused: list[FusedReduce] = []
        self._out: Path | None = options.out
        self._saved = 0

    @property
    def machine(self) -> str:
        """What records call the device."""
        return torch.cuda.get_device_name() if self.fast else "CPU"

    def note(self, bench: str, model: str, layout: Layout, value: float, unit: str, **named: Any) -> None:
        """One figure, of rank 0."""
        if self.rank == 0:
            where = self.machine, checkout_commit(), now()
            record = Record(bench, model, layout.name, *where, value, unit, **named)
            print(f"{bench} {record.layout} {model} {named}: {value:.3f} {unit}", flush=True)
            self.records.append(record)

    def save(self) -> None:
        """Write what was noted since the last time, so that whatever ends this process leaves it."""
        if self._out is not None and len(self.records) > self._saved:
            append_records(self._out, self.records[self._saved :])
            self._saved = len(self.records)

    def fused(self, limits: ReduceLimits, width: int) -> FusedReduce:
        """Sums over peer memory, which only GPUs have."""
        fused = FusedReduce(self.store, self.group.communicator, limits, width, self.device)
        self._fused.append(fused)
        return fused

    def close(self) -> None:
        """The normal end: every rank has done its last sum."""
        for fused in self._fused:
            fused.close()
        self.group.close()

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Experts dealt out whole, and split."""
        return tuple(ParallelLayout(self.size, experts, self.rank) for experts in (True, False))

    def empty_cache(self) -> None:
        """Give back what the allocator holds."""
        if self.fast:
            torch.cuda.empty_cache()


def measured_layout(layout: ParallelLayout) -> Layout:
    """As records name it."""
    ranks = layout.tensor_parallel
    return Layout(tp=ranks, ep=ranks if layout.expert_parallel else 1)
