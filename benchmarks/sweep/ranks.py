"""The engine over several ranks of this host: rank 0 in this process, each other one in its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store

from antiphon.benchmarks.engine_decode import WARMUP_STEPS
from antiphon.benchmarks.engine_model import PAGE, Bench, BenchmarkError
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.replicas import VISIBLE
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.loop import EngineLoop
from antiphon.engine.settings import EngineSettings
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.parallel.commands import RankModel
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout, RankShape
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer

JOIN_TIMEOUT_S = 180.0
LOAD_TIMEOUT_S = 900.0
STEP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class CachePages:
    """Pages of every rank's cache, the same for all points of a layout: the other ranks allocate once."""

    full: int
    sliding: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What every rank must know."""

    model: str
    layout: Layout
    device_type: str
    pages: CachePages
    fused: bool = False
    """See ``CudaRankTransformer``."""

    def device(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return torch.device("cuda", rank) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, keys and values."""
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32


@dataclass(frozen=True, slots=True)
class RankBench(Bench):
    """A ``Bench`` whose model is rank 0 of several; its engines all have caches of the same size."""

    pages: CachePages
    kv_heads: int
    road: str
    """Which kernels each rank runs."""
    replays_chunks: bool = True
    """Chunks of prompts are graphs that all ranks replay, where the device has graphs."""

    def settings(
        self,
        *,
        sequences: int,
        tokens: int,
        chunk: int = PAGE,
        graphs: bool,
        chunk_graphs: bool = False,
        prefix_cache: bool = False,
    ) -> EngineSettings:
        """As ``Bench.settings``, with the cache that the other ranks have.

        Args:
            chunk_graphs: only where the bench ``replays_chunks``.

        Raises:
            BenchmarkError: it is too small for these sequences.
        """
        graphs = graphs and self.device.type == "cuda"
        needed = Bench.settings(
            self,
            sequences=sequences,
            tokens=tokens,
            chunk=chunk,
            graphs=graphs,
            chunk_graphs=chunk_graphs and self.replays_chunks,
            prefix_cache=prefix_cache,
        )
        if needed.full_pages > self.pages.full or needed.sliding_pages > self.pages.sliding:
            raise BenchmarkError(
                f"{needed.full_pages} full and {needed.sliding_pages} sliding pages are needed, "
                f"the ranks have {self.pages.full} and {self.pages.sliding}"
            )
        return replace(needed, full_pages=self.pages.full, sliding_pages=self.pages.sliding)

    def engine(self, settings: EngineSettings) -> EngineLoop:
        """As ``Bench.engine``, of rank 0's heads."""
        loop = EngineLoop(
            self.model, settings, device=self.device, kv_dtype=self.kv_dtype, kv_heads=self.kv_heads
        )
        _randomise(loop.kv_cache)
        return loop


def pages_for(config: GptOssConfig, points: Sequence[Point], steps: int, chunk: int) -> CachePages:
    """A cache that the engine of every point fits into."""
    full = sliding = 0
    for point in points:
        if point.input_tokens is not None:
            sequences, tokens, step = 2, point.input_tokens + PAGE, chunk
        else:
            sequences, step = point.batch or 1, PAGE
            tokens = (point.context or 0) + WARMUP_STEPS + steps + PAGE
        pages = -(-tokens // PAGE) + 2
        window = -(-(config.sliding_window + step) // PAGE) + 2
        full = max(full, sequences * pages)
        sliding = max(sliding, sequences * min(pages, window) + window)
    return CachePages(full, sliding)


@contextmanager
def open_rank_bench(plan: RankPlan, waiting: list[Connection] | None = None) -> Iterator[RankBench]:
    """Start the other ranks, meet them, and end them with the block.

    Args:
        waiting: pipes to processes in ``wait_for_plan``, which become ranks and are taken from the list;
            further ones are started here.

    Raises:
        ConfigError: the model cannot be spread this way.
        RankLostError: a rank did not come or died.
    """
    size = plan.layout.tp
    ParallelLayout(size, plan.layout.ep > 1, 0).check(preset(plan.model))
    store = open_store(0, size)
    others: list[BaseProcess] = []
    told: list[Connection] = []
    for rank in range(1, size):
        if waiting:
            told.append(waiting.pop())
            told[-1].send((plan, rank, store.port))
        else:
            others.append(
                SPAWN.Process(target=follow, args=(plan, rank, store.port), name=f"rank-{rank}", daemon=True)
            )
            others[-1].start()
    try:
        model, group = load_rank(plan, 0, store)
        leader = LeaderModel(model, group)
        leader.start()
        try:
            heads = len(model.shape.kv_heads)
            about = plan.model, leader, plan.device(0), plan.dtype
            yield RankBench(*about, resident_fp8=False, pages=plan.pages, kv_heads=heads, road=model.road)
        finally:
            leader.close()
    finally:
        for process in others:
            process.join(END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
        for pipe in told:  # closes with the process, which whoever started it kills if it must
            pipe.poll(END_TIMEOUT_S)
            pipe.close()


def wait_for_plan(pipe: Connection, visible: str | None) -> None:
    """A process that has loaded everything, and is a rank other than 0 once it is told which.

    Args:
        visible: GPUs that it shall see, as of ``CUDA_VISIBLE_DEVICES``.
    """
    if visible is not None:
        os.environ[VISIBLE] = visible
    try:
        plan, rank, port = pipe.recv()
    except EOFError:
        return  # nobody needed it
    follow(plan, rank, port)


def follow(plan: RankPlan, rank: int, port: int) -> None:
    """The whole life of a rank other than 0."""
    if plan.device_type == "cpu":
        torch.set_num_threads(1)
    store = open_store(rank, plan.layout.tp, port=port, timeout_s=JOIN_TIMEOUT_S)
    model, group = load_rank(plan, rank, store)
    pages = PagedKvCache(
        model.config,
        full_pages=plan.pages.full,
        sliding_pages=plan.pages.sliding,
        page_size=PAGE,
        dtype=plan.dtype,
        device=plan.device(rank),
        kv_heads=len(model.shape.kv_heads),
    )
    _randomise(pages)
    FollowerLoop(model, pages, group).run()


class RankPart(RankModel, Protocol):
    """One rank's model, and what it is made of."""

    shape: RankShape

    @property
    def road(self) -> str:
        """Which kernels run."""


class PlainPart(ParallelTransformer):
    """The plain model, which names itself."""

    road = "plain torch"


def load_rank(plan: RankPlan, rank: int, store: Store) -> tuple[RankPart, RankGroup]:
    """Join the other ranks; synthesize this rank's part on its device: the fast model on a GPU."""
    device, layout = plan.device(rank), ParallelLayout(plan.layout.tp, plan.layout.ep > 1, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup.join(
        store,
        rank,
        plan.layout.tp,
        device=device,
        timeout_s=STEP_TIMEOUT_S,
        join_timeout_s=JOIN_TIMEOUT_S,
        load_timeout_s=LOAD_TIMEOUT_S,
    )
    config = preset(plan.model)
    parameters = shard_parameters(config, layout, synthesize_parameters(config, 0, device))
    if device.type == "cpu":
        plain = PlainPart(config, layout, group.communicator, plan.dtype, device)
        fill(plain, parameters)
        return plain, group
    from antiphon.model.parallel.cuda_transformer import CudaRankTransformer  # loads Triton
    from antiphon.model.parallel.peer_memory import FusedReduce
    from antiphon.model.parallel.reduce_limits import limits_of

    reduce = FusedReduce(store, group.communicator, limits_of(group.size), config.hidden_size, device)
    fast = CudaRankTransformer(
        *(config, layout, group.communicator, parameters, device),
        row_reduce=reduce,
        fused=plan.fused,
    )
    return fast, group


def _randomise(cache: PagedKvCache) -> None:
    """Random keys and values everywhere, as on one rank."""
    for group in ("full", "sliding"):
        memory = cache.memory(group)
        for first in range(0, memory.shape[0], 256):
            memory[first : first + 256].normal_()
