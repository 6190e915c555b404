"""What several GPUs of one host reach with one model: sums over ranks, agreement with one GPU, step times.

Each rank is a process. ``--parts`` picks among

    sums        sum + residual + norm of 1 to 8,192 rows in every way, and where one overtakes another
    agreement   argmax at every position of a prompt, and of decode steps, against the same model on one GPU
    steps       decode steps as graphs and prefill chunks of a published shape, random weights; GPUs only
    texts       an engine on rank 0 whose graphs all ranks replay, against the same engine on one GPU; last

``--device cpu`` runs the same road over gloo with plain torch. The time of steps and prompts through the real
engine is ``rank_engine``'s.

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
from pathlib import Path

import torch

from antiphon.benchmarks.floors import decode_floor_ms
from antiphon.benchmarks.model_step import PAGE, random_cache, time_decode, time_prefill
from antiphon.benchmarks.rank_agreement import Subject, agreement, rank_model, single_model, subject
from antiphon.benchmarks.rank_process import Rank, measured_layout
from antiphon.benchmarks.rank_sums import sums
from antiphon.benchmarks.records import Layout
from antiphon.engine.events import TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.config import preset
from antiphon.model.forward import LanguageModel
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.leader import LeaderModel
from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.messages import SamplingParams


def steps(rank: Rank, model: str, batches: list[int], prompts: list[int], context: int) -> None:
    """Decode steps and prefill chunks, experts dealt out whole.

    Raises:
        AntiphonError: there are no GPUs.
    """
    if not rank.fast:
        raise AntiphonError(
            "steps are replayed graphs and need GPUs; `antiphon bench sweep` times layouts on a CPU"
        )
    config = preset(model)
    layout = rank.layouts()[0]
    begin = time.perf_counter()
    spread = rank_model(rank, layout, Subject(model, config, (), (), config.num_hidden_layers))
    kv_heads = config.num_key_value_heads // rank.size
    if rank.rank == 0:
        used = torch.cuda.memory_allocated() / 1e9
        print(f"{model}: {time.perf_counter() - begin:.0f} s, {used:.1f} GB", flush=True)
    where = measured_layout(layout)
    for batch in batches:
        value = time_decode(spread, batch, context, steps=64, kv_heads=kv_heads)
        floor = decode_floor_ms(config, batch, context) / rank.size
        extra: dict[str, object] = {"floor_of": "bytes of one GPU over the ranks"}
        rank.note(
            "decode_step", model, where, value, "ms", batch=batch, context=context, floor=floor, extra=extra
        )
        rank.save()
        rank.empty_cache()
    for tokens in prompts:
        value = time_prefill(spread, tokens, kv_heads=kv_heads)
        rank.note("prefill", model, where, value, "ms", input_tokens=tokens)
        rank.save()
        rank.empty_cache()


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
        decode_graphs=device.type == "cuda",
    )
    kv_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loop = EngineLoop(model, settings, device=device, kv_dtype=kv_dtype, kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(max_tokens=length, seed=1, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        tokens = min(199_998, model.config.vocab_size)
        prompt = torch.randint(0, tokens, (100 + 37 * index,), generator=generator).tolist()
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


def texts(rank: Rank, model: str, batch: int = 8, length: int = 64) -> None:
    """The same texts as one GPU's as far as near ties allow, and what a step costs with its commands."""
    about = subject(model)
    layout = rank.layouts()[0]
    kv_heads = about.config.num_key_value_heads // rank.size
    extra: dict[str, object] = {"layers": about.layers}
    expected: dict[str, list[int]] = {}
    if rank.rank == 0:
        single = single_model(rank, about)
        expected, alone_ms = engine_texts(single, rank.device, None, batch, length)
        rank.note("engine_step", model, Layout(), alone_ms, "ms", batch=batch, extra=extra)
        del single
        rank.empty_cache()
    spread = rank_model(rank, layout, about)
    if rank.rank:
        pages = random_cache(spread, 64 * batch, 16 * batch + 16, kv_heads, rank.device)
        FollowerLoop(spread, pages, rank.group).run()
        return
    leader = LeaderModel(spread, rank.group)
    leader.start()
    found, step_ms = engine_texts(leader, rank.device, kv_heads, batch, length)
    leader.close()
    agreeing = [
        next((i for i, (a, b) in enumerate(zip(found[r], expected[r], strict=True)) if a != b), length)
        for r in expected
    ]
    extra = {**extra, "equal_tokens_of": [sum(agreeing), batch * length]}
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
        "texts": lambda: texts(mine, options.model, *((8, 64) if mine.fast else (2, 8))),
    }
    for name in options.parts.split(","):
        try:
            parts[name]()
        finally:
            mine.save()
    mine.close()


def main() -> int:
    """Run the parts; 0 when every rank ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", default="sums,agreement,steps")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prefill", default="1024,8192")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
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
