"""Time of a model's forward pass on one GPU, without the engine around it.

Random weights of a published shape, random KV in pages of its own for every sequence. Decode is a CUDA graph
of forward, logits and argmax; prefill runs eagerly.

Run: ``python -m antiphon.benchmarks.model_step --model gpt-oss-20b --batches 1,8,32 --prefill 1024,8192``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from antiphon.benchmarks.floors import decode_floor_ms
from antiphon.benchmarks.records import checkout_commit, now
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch, LanguageModel

PAGE = 64
WINDOW_PAGES = 3
Record = dict[str, object]


def random_cache(
    model: LanguageModel,
    full_pages: int,
    sliding_pages: int,
    kv_heads: int | None = None,
    device: torch.device | str = "cuda",
    full_fp8: bool = False,
) -> PagedKvCache:
    """A cache full of random keys and values; of one rank's heads where ``kv_heads`` says how many."""
    cache = PagedKvCache(
        model.config,
        full_pages=full_pages,
        sliding_pages=sliding_pages,
        page_size=PAGE,
        dtype=torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32,
        device=device,
        kv_heads=kv_heads,
        full_fp8=full_fp8,
    )
    cache.randomise()
    return cache


def decode_batch(batch: int, context: int) -> ForwardBatch:
    """One token for each of ``batch`` sequences that hold ``context`` tokens, pages shuffled."""
    pages = -(-(context + 1) // PAGE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context + 1, dtype=torch.int32, device="cuda")
    offset, row = context % PAGE, torch.arange(batch, device="cuda")
    full = torch.randperm(batch * pages, device="cuda").reshape(batch, pages).int()
    held = torch.randperm(batch * WINDOW_PAGES, device="cuda").reshape(batch, WINDOW_PAGES).int()
    sliding = torch.zeros(batch, pages, dtype=torch.int32, device="cuda")
    sliding[:, -WINDOW_PAGES:] = held[:, : min(pages, WINDOW_PAGES)]
    groups = [
        PagedSequences(table, starts, lengths, table[row, -1].long() * PAGE + offset)
        for table in (full, sliding)
    ]
    tokens = torch.randint(0, 199_998, (batch,), device="cuda")
    return ForwardBatch(tokens, torch.full((batch,), context, device="cuda"), groups[0], groups[1])


def kernel_table(graph: torch.cuda.CUDAGraph, replays: int = 20, rows: int = 16) -> str:
    """Where a captured step's time goes: launches and microseconds per step of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    lines = [
        f"  {event.count / replays:6.1f} x {event.self_device_time_total / event.count:8.2f} us "
        f"= {event.self_device_time_total / replays:8.1f}  {event.key[:90]}"
        for event in sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:rows]
    ]
    return "\n".join(lines)


@torch.inference_mode()
def time_decode(
    model: LanguageModel,
    batch: int,
    context: int,
    steps: int = 128,
    profile: bool = False,
    kv_heads: int | None = None,
    full_fp8: bool = False,
) -> float:
    """Median milliseconds of a step."""
    pages = -(-(context + 1) // PAGE)
    cache = random_cache(model, batch * pages, batch * WINDOW_PAGES, kv_heads, full_fp8=full_fp8)
    inputs = decode_batch(batch, context)

    def step() -> torch.Tensor:
        return model.logits(model.forward(inputs, cache)).argmax(-1)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread goes on
        chosen = step()
    samples = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        inputs.token_ids.random_(0, 199_998)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    if profile:
        print(kernel_table(graph), flush=True)
    if not bool((chosen >= 0).all()):
        raise RuntimeError("the step chose no token")
    return float(statistics.median(samples))


@torch.inference_mode()
def time_prefill(model: LanguageModel, tokens: int, repeats: int = 3, kv_heads: int | None = None) -> float:
    """Median milliseconds of one chunk of ``tokens`` from position 0."""
    pages = -(-tokens // PAGE)
    cache = random_cache(model, pages, pages, kv_heads)
    positions = torch.arange(tokens, device="cuda")
    table = torch.randperm(pages, device="cuda").reshape(1, pages).int()
    slot = table[0, positions // PAGE].long() * PAGE + positions % PAGE
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    sequences = PagedSequences(table, ends, ends[1:].contiguous(), slot)
    samples = []
    for index in range(repeats + 1):
        ids = torch.randint(0, 199_998, (tokens,), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        hidden = model.forward(ForwardBatch(ids, positions, sequences, sequences), cache)
        torch.cuda.synchronize()
        if index:
            samples.append((time.perf_counter() - begin) * 1e3)
    if not bool(torch.isfinite(hidden).all()):
        raise RuntimeError("prefill produced values that are not finite")
    return statistics.median(samples)


def main() -> None:
    """Print one line per point; write records with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prefill", default="")
    parser.add_argument("--resident-fp8", action="store_true", help="hold FP8 experts beside the 4-bit ones")
    parser.add_argument("--profile", action="store_true", help="also print each step's kernels")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = preset(options.model)
    begin = time.perf_counter()
    parameters = synthesize_parameters(config, 0, "cuda")
    model = CudaTransformer(config, parameters, resident_fp8=options.resident_fp8)
    print(
        f"{options.model} on the {model.road} road, ready in {time.perf_counter() - begin:.1f} s, "
        f"{torch.cuda.memory_allocated() / 1e9:.1f} GB",
        flush=True,
    )
    rows: list[Record] = []
    common: Record = {
        "bench": "model_step",
        "model": options.model,
        "layout": "TP1",
        "device": torch.cuda.get_device_name(),
        "commit": checkout_commit(),
        "date": now(),
        "unit": "ms",
    }
    for batch in (int(b) for b in options.batches.split(",") if b):
        value = time_decode(model, batch, options.context, profile=options.profile)
        print(f"decode batch {batch:4d} context {options.context}: {value:.3f} ms", flush=True)
        floor = decode_floor_ms(config, batch, options.context)
        rows.append({**common, "batch": batch, "context": options.context, "value": value, "floor": floor})
        torch.cuda.empty_cache()
    for tokens in (int(t) for t in options.prefill.split(",") if t):
        value = time_prefill(model, tokens)
        print(f"prefill {tokens} tokens: {value:.2f} ms", flush=True)
        rows.append({**common, "input_tokens": tokens, "value": value})
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
