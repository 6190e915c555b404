"""What several GPUs of one host reach with one model: sums over ranks, agreement with one GPU, step times.

Each rank is a process. ``--parts`` picks among

    sums        sum + residual + norm of a step's rows: one launch over peer memory against NCCL and a kernel
    agreement   argmax at every position of a prompt, and of decode steps, against the same model on one GPU
    steps       decode steps as graphs and prefill chunks of a published shape, random weights
    engine      an engine on rank 0 whose graphs all ranks replay, against the same engine on one GPU; last

    python -m antiphon.benchmarks.rank_steps --ranks 2 --parts sums,agreement,steps --model gpt-oss-20b
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.benchmarks.floors import decode_floor_ms
from antiphon.benchmarks.model_step import PAGE, random_cache, time_decode, time_prefill
from antiphon.benchmarks.records import Layout, Record, append_records, checkout_commit, now
from antiphon.benchmarks.timing import graph_time_us
from antiphon.engine.events import TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.kernels.dense.norm import add_rms_norm_
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch, LanguageModel
from antiphon.model.parallel.cuda_load import FUSED_ROWS
from antiphon.model.parallel.cuda_transformer import CudaRankTransformer
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.peer_memory import FusedReduce
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.protocol.messages import SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTH = 2880


class Rank:
    """One rank's process: its group, and where its records go."""

    def __init__(self, rank: int, options: argparse.Namespace, port: int) -> None:
        torch.cuda.set_device(rank)
        torch.manual_seed(0)  # the same numbers on every rank
        self.rank, self.size = rank, int(options.ranks)
        self.device = torch.device("cuda", rank)
        self.store = open_store(rank, self.size, port=port)
        self.group = RankGroup.join(self.store, rank, self.size, device=self.device, timeout_s=300.0)
        self.store.set_timeout(timedelta(seconds=300))  # one rank may compile what the others do not need
        self.records: list[Record] = []

    def note(self, bench: str, model: str, layout: Layout, value: float, unit: str, **named: Any) -> None:
        """One figure, of rank 0."""
        if self.rank == 0:
            where = torch.cuda.get_device_name(), checkout_commit(), now()
            record = Record(bench, model, layout.name, *where, value, unit, **named)
            print(f"{bench} {record.layout} {model} {named}: {value:.3f} {unit}", flush=True)
            self.records.append(record)

    def fused(self, rows: int) -> FusedReduce:
        """Sums of up to so many rows over peer memory."""
        return FusedReduce(self.store, self.group.communicator, rows, WIDTH, self.device)

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Experts dealt out whole, and split."""
        return tuple(ParallelLayout(self.size, experts, self.rank) for experts in (True, False))


def measured_layout(layout: ParallelLayout) -> Layout:
    """As records name it."""
    ranks = layout.tensor_parallel
    return Layout(tp=ranks, ep=ranks if layout.expert_parallel else 1)


def sums(rank: Rank) -> None:
    """The two ways to add a half layer's part, and whether they say the same.

    Raises:
        RuntimeError: they do not.
    """
    fused, group = rank.fused(max(ROWS)), rank.group.communicator
    weight = torch.randn(WIDTH, device=rank.device).bfloat16()
    layout = Layout(tp=rank.size)
    for rows in ROWS:
        part = torch.randn(rows, WIDTH, device=rank.device).bfloat16() * (rank.rank + 1)
        start = torch.randn(rows, WIDTH, device=rank.device).bfloat16()
        x, y = start.clone(), start.clone()
        one, other = fused.add_norm_(part, x, weight, 1e-5), None
        other = add_rms_norm_(group.all_reduce(part.clone()), y, weight, 1e-5)
        same = float((x == y).float().mean()), float((one - other).abs().max())
        everyone = group.all_gather(x)
        if not all(torch.equal(everyone[0], each) for each in everyone):
            raise RuntimeError(f"ranks hold different sums of {rows} rows")
        scratch = part.clone()

        def by_library(scratch: Tensor = scratch, y: Tensor = y) -> Tensor:
            return add_rms_norm_(group.all_reduce(scratch), y, weight, 1e-5)

        def in_one(part: Tensor = part, x: Tensor = x) -> Tensor:
            return fused.add_norm_(part, x, weight, 1e-5)

        for name, launch in (("peer memory, one launch", in_one), ("NCCL, add and norm", by_library)):
            value = graph_time_us([launch] * 48)
            extra = {"equal_share": same[0], "largest_difference": same[1]}
            rank.note("all_reduce", "", layout, value, "us", batch=rows, kernel=name, extra=extra)


def one_sequence(tokens: Tensor, begin: int, pages: Tensor) -> ForwardBatch:
    """Tokens ``begin ..`` of one sequence whose logical pages are ``pages``."""
    end = begin + tokens.shape[0]
    positions = torch.arange(begin, end, device=tokens.device)
    slot = pages[positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, tokens.shape[0]], dtype=torch.int32, device=tokens.device)
    length = torch.tensor([end], dtype=torch.int32, device=tokens.device)
    sequences = PagedSequences(pages.int()[None], starts, length, slot)
    return ForwardBatch(tokens, positions, sequences, sequences)


@torch.inference_mode()
def choices(model: LanguageModel, tokens: Tensor, steps: int, kv_heads: int | None) -> Tensor:
    """argmax at every position of a prompt, then of decode steps that are told what to read."""
    prompt, pages = tokens.shape[0] - steps, -(-tokens.shape[0] // PAGE)
    cache = random_cache(model, pages, pages, kv_heads)
    table = torch.arange(pages, device=tokens.device)
    hidden = model.forward(one_sequence(tokens[:prompt], 0, table), cache)
    found = [model.logits(hidden[i : i + 256]).argmax(-1) for i in range(0, prompt, 256)]
    for place in range(prompt, tokens.shape[0]):
        hidden = model.forward(one_sequence(tokens[place : place + 1], place, table), cache)
        found.append(model.logits(hidden).argmax(-1))
    return torch.cat(found)


def rank_model(
    rank: Rank, layout: ParallelLayout, config: GptOssConfig, resident_fp8: bool = False
) -> CudaRankTransformer:
    """This rank's part of a model with random weights, the same on every rank."""
    parameters = shard_parameters(config, layout, synthesize_parameters(config, 0, rank.device))
    return CudaRankTransformer(
        *(config, layout, rank.group.communicator, parameters, rank.device),
        row_reduce=rank.fused(FUSED_ROWS),
        resident_fp8=resident_fp8,
    )


def agreement(rank: Rank, model: str) -> None:
    """Share of positions with the same argmax as on one GPU, of a model with fewer layers."""
    config = replace(preset(model), num_hidden_layers=4)
    tokens = torch.randint(0, 199_998, (1024 + 16,), device=rank.device)
    expected = None
    if rank.rank == 0:
        parameters = synthesize_parameters(config, 0, rank.device)
        expected = choices(CudaTransformer(config, parameters, rank.device), tokens, 16, None)
        torch.cuda.empty_cache()
    for layout in rank.layouts():
        spread = rank_model(rank, layout, config)
        found = choices(spread, tokens, 16, config.num_key_value_heads // rank.size)
        if expected is not None:
            equal = (found == expected).float()
            extra = {"decode_share": float(equal[-16:].mean()), "positions": len(equal), "layers": 4}
            named = {"kernel": spread.road, "extra": extra}
            rank.note("agreement", model, measured_layout(layout), float(equal.mean()), "share", **named)
        del spread
        torch.cuda.empty_cache()


def steps(rank: Rank, model: str, batches: list[int], prompts: list[int], context: int) -> None:
    """Decode steps and prefill chunks, experts dealt out whole."""
    config = preset(model)
    layout = rank.layouts()[0]
    begin = time.perf_counter()
    spread = rank_model(rank, layout, config)
    kv_heads = config.num_key_value_heads // rank.size
    if rank.rank == 0:
        used = torch.cuda.memory_allocated() / 1e9
        print(f"{model}: {spread.road}, {time.perf_counter() - begin:.0f} s, {used:.1f} GB", flush=True)
    where = measured_layout(layout)
    for batch in batches:
        value = time_decode(spread, batch, context, steps=64, kv_heads=kv_heads)
        floor = decode_floor_ms(config, batch, context) / rank.size
        extra: dict[str, object] = {"floor_of": "bytes of one GPU over the ranks"}
        rank.note(
            "decode_step", model, where, value, "ms", batch=batch, context=context, floor=floor, extra=extra
        )
        torch.cuda.empty_cache()
    for tokens in prompts:
        value = time_prefill(spread, tokens, kv_heads=kv_heads)
        rank.note("prefill", model, where, value, "ms", input_tokens=tokens)
        torch.cuda.empty_cache()


def engine_texts(
    model: LanguageModel, device: torch.device, kv_heads: int | None, batch: int, length: int
) -> tuple[dict[str, list[int]], float]:
    """Greedy texts of ``batch`` prompts decoded together, and the median milliseconds between two steps."""
    settings = EngineSettings(
        page_size_tokens=PAGE,
        full_pages=64 * batch,
        sliding_pages=16 * batch + 16,
        window_tokens=model.config.sliding_window,
        max_context_tokens=4096,
        vocab_size=model.config.vocab_size,
        chunk_tokens=1024,
        max_batch_size=batch,
        headroom_tokens=PAGE,
        overlap=True,
        decode_graphs=True,
    )
    loop = EngineLoop(model, settings, device=device, kv_dtype=torch.bfloat16, kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(max_tokens=length, seed=1, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(0, 199_998, (100 + 37 * index,), generator=generator).tolist()
        loop.submit(EngineRequest(f"r{index}", 1, RequestKind.COLOCATED, tuple(prompt), sampling=params))
    texts: dict[str, list[int]] = {f"r{index}": [] for index in range(batch)}
    at: list[float] = []
    while loop.has_work():
        events = [event for event in loop.step() if isinstance(event, TokensSampled)]
        for event in events:
            texts[event.request_id] += event.token_ids
        if len(events) == batch:
            at.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    return texts, statistics.median(gaps) * 1e3


def engine(rank: Rank, model: str, batch: int = 8, length: int = 64) -> None:
    """The same texts as one GPU's as far as near ties allow, and what a step costs with its commands."""
    config = replace(preset(model), num_hidden_layers=4)
    layout = rank.layouts()[0]
    kv_heads = config.num_key_value_heads // rank.size
    expected: dict[str, list[int]] = {}
    if rank.rank == 0:
        single = CudaTransformer(config, synthesize_parameters(config, 0, rank.device), rank.device)
        expected, alone_ms = engine_texts(single, rank.device, None, batch, length)
        rank.note("engine_step", model, Layout(), alone_ms, "ms", batch=batch, extra={"layers": 4})
        del single
    spread = rank_model(rank, layout, config)
    if rank.rank:
        pages = random_cache(spread, 64 * batch, 16 * batch + 16, kv_heads)
        FollowerLoop(spread, pages, rank.group).run()
        return
    leader = LeaderModel(spread, rank.group)
    leader.start()
    texts, step_ms = engine_texts(leader, rank.device, kv_heads, batch, length)
    leader.close()
    agreeing = [
        next((i for i, (a, b) in enumerate(zip(texts[r], expected[r], strict=True)) if a != b), length)
        for r in expected
    ]
    extra = {"layers": 4, "equal_tokens_of": [sum(agreeing), batch * length]}
    rank.note("engine_step", model, measured_layout(layout), step_ms, "ms", batch=batch, extra=extra)


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    """One process."""
    mine = Rank(rank, options, port)
    batches = [int(batch) for batch in options.batches.split(",") if batch]
    prompts = [int(tokens) for tokens in options.prefill.split(",") if tokens]
    parts: dict[str, Callable[[], None]] = {
        "sums": lambda: sums(mine),
        "agreement": lambda: agreement(mine, options.model),
        "steps": lambda: steps(mine, options.model, batches, prompts, options.context),
        "engine": lambda: engine(mine, options.model),
    }
    for name in options.parts.split(","):
        parts[name]()
        if rank == 0 and options.out:
            append_records(options.out, mine.records)
    mine.group.close()


def main() -> int:
    """Run the parts; 0 when every rank ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", default="sums,agreement,steps")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prefill", default="1024,8192")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, options, port), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        time.sleep(0.2)
        if any(process.exitcode not in (None, 0) for process in ranks):
            for process in ranks:
                process.kill()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    raise SystemExit(main())
