"""What FP8 pages save of a decode step on one GPU, and what they cost a chunk of a prompt.

Decode attention of one full layer over bf16 pages and over FP8 ones, with several numbers of splits;
attention of a chunk behind a long prefix, with what widens the pages before it; whole steps of a model with
random weights. Random keys and values, each sequence in pages of its own.

Run: ``python -m antiphon.benchmarks.fp8_pages --out FILE``; a part that ``--limit`` leaves no time for is
left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from antiphon.benchmarks.floors import decode_floor_ms
from antiphon.benchmarks.model_step import time_decode
from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.records import checkout_commit, now
from antiphon.benchmarks.timing import graph_time_us, relative_error
from antiphon.kernels import reference
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.fp8_hopper import FewTokens, HopperFp8DecodeAttention, choose_fp8_splits
from antiphon.kernels.attention.prefill_hopper import hopper_prefill_attention
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_transformer import CudaTransformer

Q, G, D, S = 64, 8, 64, 64
SCALE = 0.125
BOUND = 5e-3
POINTS = ((1, 32768), (8, 32768), (32, 32768), (8, 131072))
STEPS = ((32, 32768), (8, 131072))
SPLITS = (1, 2, 3, 6, 12)
Record = dict[str, object]


def sequences(batch: int, context: int, queries: int = 1) -> PagedSequences:
    """Sequences of so many keys in shuffled pages."""
    pages = -(-context // S)
    table = torch.randperm(batch * pages, device="cuda").reshape(batch, pages).int()
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    return PagedSequences(
        table, starts, lengths, torch.zeros(batch * queries, dtype=torch.int64, device="cuda")
    )


def fp8_pages(count: int) -> Fp8Pages:
    """A layer of random numbers of a normal distribution."""
    pages = Fp8Pages(torch.empty(count, G, head_bytes(S, D), dtype=torch.uint8, device="cuda"), S, D)
    numbers = torch.randn(pages.shape, device="cuda", dtype=torch.bfloat16) * 100
    pages.codes.copy_(numbers.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    pages.scales.fill_(0.01)
    return pages


def said(what: str, us: float, floor_us: float, error: float | None = None) -> Record:
    """One record; prints it."""
    checked = "" if error is None else f"  err {error:.1e} {'ok' if error <= BOUND else 'BAD'}"
    print(f"{what:52s} {us:9.1f} us  floor {floor_us:8.1f}  {floor_us / us:4.2f}{checked}", flush=True)
    return {"what": what, "us": us, "floor_us": floor_us, "error": error}


def wrong(row: Record) -> bool:
    """Whether a result was checked, and is none."""
    error = row.get("error")
    return isinstance(error, float) and not error <= BOUND


def decode(batch: int, context: int) -> list[Record]:
    """One full layer of a decode step."""
    slots = batch * context
    sets = max(1, int(4e8 / (slots * 2 * G * D)) + 1)
    views = [sequences(batch, context) for _ in range(sets)]
    count = batch * -(-context // S)
    query, sinks = torch.randn(batch, Q, D, device="cuda").bfloat16(), torch.randn(Q, device="cuda")
    out, name = torch.empty_like(query), f"B={batch} context={context}"
    plain = [torch.randn(count, G, 2, S, D, device="cuda", dtype=torch.bfloat16) for _ in views]
    bf16 = DecodeAttention(batch, Q, G, D, query.device, pdl=True)
    calls: list[Callable[[], object]] = [
        partial(bf16.full, query, layer, view, sinks, SCALE, out)
        for layer, view in zip(plain, views, strict=True)
    ]
    floor = slots * 2 * G * D * 2 / H200.bytes_per_s * 1e6
    found = [said(f"decode bf16 s={bf16.splits} {name}", graph_time_us(calls, rounds=4), floor)]
    del plain, calls
    layers = [fp8_pages(count) for _ in views]
    floor = slots * 2 * G * (D + 2) / H200.bytes_per_s * 1e6
    expected = reference.paged_attention(query.float(), layers[0], views[0], sinks, None, SCALE)
    chosen = choose_fp8_splits(batch, G)
    kernels: list[tuple[str, HopperFp8DecodeAttention | Fp8DecodeAttention]] = [
        ("cuda", HopperFp8DecodeAttention(batch, G, query.device, splits, pdl=True))
        for splits in (chosen, *(s for s in SPLITS if s != chosen and batch * G * s < 2000))
    ]
    kernels.append(("triton", Fp8DecodeAttention(batch, Q, G, D, query.device)))
    for road, kernel in kernels:
        error = relative_error(kernel.full(query, layers[0], views[0], sinks, SCALE, out), expected)
        us = graph_time_us(
            [
                partial(kernel.full, query, layer, view, sinks, SCALE, out)
                for layer, view in zip(layers, views, strict=True)
            ],
            rounds=4,
        )
        mark = " (chosen)" if road == "cuda" and kernel.splits == chosen else ""
        found.append(said(f"decode fp8 {road} s={kernel.splits}{mark} {name}", us, floor, error))
    return found


def chunk(tokens: int, context: int) -> list[Record]:
    """A chunk's attention in one full layer, and what widens the pages that it sees."""
    view, count = sequences(1, context, tokens), -(-context // S)
    pages, room = fp8_pages(count), WidePages()
    query, sinks = torch.randn(tokens, Q, D, device="cuda").bfloat16(), torch.randn(Q, device="cuda")
    out, name = torch.empty_like(query), f"{tokens} of {context}"
    wide = room.widen(pages, view, torch.bfloat16)
    attend = partial(hopper_prefill_attention, query, wide, view, sinks, None, SCALE, tokens, out)
    pairs = tokens * (context - tokens) + tokens * tokens / 2
    return [
        said(f"chunk attention {name}", graph_time_us([attend]), 4 * Q * D * pairs / H200.bf16_flops * 1e6),
        said(
            f"widen {name}",
            graph_time_us([partial(room.widen, pages, view, torch.bfloat16)]),
            context * 2 * G * (D + 2 + 2 * D) / H200.bytes_per_s * 1e6,
        ),
    ]


def store() -> Record:
    """The write that few tokens need of their own."""
    few, pages = FewTokens(G, torch.device("cuda")), fp8_pages(64)
    slot = torch.arange(8, device="cuda") * S
    return said("store 8 tokens", graph_time_us([partial(few.store, pages, slot, pdl=True)], rounds=40), 0.0)


def steps(model: CudaTransformer, batch: int, context: int) -> Record:
    """A whole step with either kind of pages, milliseconds."""
    values: dict[str, float] = {}
    for name, full_fp8 in (("bf16", False), ("fp8", True)):
        values[name] = time_decode(model, batch, context, steps=24, full_fp8=full_fp8)
        floor = decode_floor_ms(model.config, batch, context, full_fp8=full_fp8)
        values[f"{name}_floor"] = floor
        print(
            f"step {name:5s} B={batch} context={context}: {values[name]:7.3f} ms  floor {floor:7.3f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    print(f"  ratio {values['bf16'] / values['fp8']:.3f}", flush=True)
    return {"what": "step", "batch": batch, "context": context, **values}


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and write it; 1 if a kernel is farther from the plain op than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.limit
    found: list[Record] = []

    def attempt(need_s: float, measure: Callable[[], list[Record] | Record]) -> None:
        if time.monotonic() + need_s > end:
            print("no time left for the rest", flush=True)
            return
        rows = measure()
        found.extend(rows if isinstance(rows, list) else [rows])
        torch.cuda.empty_cache()
        if options.out is not None:
            head = {"commit": checkout_commit(), "date": now(), "device": torch.cuda.get_device_name()}
            options.out.write_text(json.dumps({**head, "rows": found}, indent=1) + "\n")

    for batch, context in POINTS:
        attempt(4.0, partial(decode, batch, context))
    attempt(3.0, partial(chunk, 8192, 40960))
    attempt(3.0, partial(chunk, 2048, 34816))
    attempt(1.0, store)
    if time.monotonic() + 25.0 <= end:
        config = preset(options.model)
        model = CudaTransformer(config, synthesize_parameters(config, 0, "cuda"))
        for batch, context in STEPS:
            attempt(6.0, partial(steps, model, batch, context))
    return int(any(wrong(row) for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
