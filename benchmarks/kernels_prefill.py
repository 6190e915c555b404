"""The kernels of long chunks on one GPU: error against the plain op, time, and ratio to the floor.

Run: ``python -m antiphon.benchmarks.kernels_prefill [--parts attention,moe] [--out FILE]``. Weights and
routings rotate over several layers inside one CUDA graph, so that L2 serves none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.benchmarks.records import Layout, Record, append_records, checkout_commit, now
from antiphon.benchmarks.timing import graph_time_us, relative_error
from antiphon.kernels import reference, router
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.prefill_hopper import hopper_prefill_attention
from antiphon.kernels.moe import mixed
from antiphon.kernels.moe.chunk_route import RouteScratch, route_ranked
from antiphon.kernels.moe.mixed import MixedWorkspace, RowExponents
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, PagedSequences, dequantize_mxfp4

BYTES_PER_S = 4.8e12
BF16_FLOPS = 990e12
FP8_FLOPS = 1979e12
MXFP4_BYTES = 17 / 32
HEADS, KV_HEADS, HEAD_DIM, PAGE, WINDOW = 64, 8, 64, 64, 128
EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
ATTENTION_BOUND = 5e-3
MOE_BOUND = 4e-2


def record(
    kernel: str, model: str, tokens: int, context: int, us: float, floor_us: float, **extra: object
) -> Record:
    """One row; prints it."""
    shown = " ".join(f"{key} {value}" for key, value in extra.items())
    print(
        f"{kernel:24s} {model:12s} T={tokens:<6d} ctx={context:<6d} {us:9.1f} us, floor {floor_us:8.1f} "
        f"({floor_us / us:4.2f}) {shown}",
        flush=True,
    )
    return Record(
        bench="kernel",
        model=model,
        layout=Layout().name,
        device=torch.cuda.get_device_name(),
        commit=checkout_commit(),
        date=now(),
        value=round(us, 2),
        unit="us",
        floor=round(floor_us, 2),
        kernel=kernel,
        extra=dict(extra),
        input_tokens=tokens,
        context=context,
    )


# -------------------------------------------------------------------------------------------------- attention


def paged(tokens: int, context: int) -> tuple[Tensor, PagedSequences]:
    """A cache of one sequence in shuffled pages, one layer of a group of twelve."""
    pages = -(-context // PAGE)
    shape = (pages + 1, 12, KV_HEADS, 2, PAGE, HEAD_DIM)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").reshape(1, pages).int()
    starts = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([context], device="cuda", dtype=torch.int32)
    return cache[:, 3], PagedSequences(table, starts, lengths, torch.zeros(tokens, dtype=torch.int64))


def attention_error(
    query: Tensor, layer: Tensor, sequences: PagedSequences, sinks: Tensor, window: int | None, out: Tensor
) -> float:
    """Of a sample of the query tokens, the last ones included, as the plain op in float32 has it."""
    tokens, context = query.shape[0], int(sequences.kv_len)
    worst = 0.0
    for count in sorted({min(tokens, 40), min(tokens, 1000), tokens}):
        end = count if count < tokens else tokens
        rows = slice(max(end - 32, 0), end)
        seen = context - tokens + end
        part = PagedSequences(
            sequences.block_table,
            torch.tensor([0, rows.stop - rows.start], device="cuda", dtype=torch.int32),
            torch.tensor([seen], device="cuda", dtype=torch.int32),
            sequences.slot,
        )
        expected = reference.paged_attention(query[rows].float(), layer.float(), part, sinks, window, 0.125)
        worst = max(worst, relative_error(out[rows], expected))
    return worst


def attention_point(tokens: int, context: int, window: int | None, portable: bool) -> list[Record]:
    """One chunk at the end of a context, on every road."""
    layer, sequences = paged(tokens, context)
    query = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(HEADS, device="cuda")
    first = context - tokens
    seen = sum(min(first + t + 1, window or context) for t in range(tokens))
    floor = max(4 * HEADS * HEAD_DIM * seen / BF16_FLOPS, 4 * query.nbytes / 2 / BYTES_PER_S) * 1e6
    name = "attention full" if window is None else "attention sliding"
    arguments = (query, layer, sequences, sinks, window, 0.125, tokens)
    roads = {
        f"{name} ordered": partial(hopper_prefill_attention, *arguments, ordered=True),
        name: partial(hopper_prefill_attention, *arguments, ordered=False),
    }
    if portable:
        roads[f"{name} triton"] = partial(prefill_attention, *arguments)
    rows = []
    for road, launch in roads.items():
        out = torch.full_like(query, float("nan"))
        launch(out=out)
        error = attention_error(query, layer, sequences, sinks, window, out)
        us = graph_time_us([partial(launch, out=out)], rounds=max(1, min(20, 40_000_000 // seen)), replays=5)
        tflops = 4 * HEADS * HEAD_DIM * seen / us / 1e6
        ok = error <= ATTENTION_BOUND
        rows.append(
            record(
                road, "gpt-oss", tokens, context, us, floor, tflops=round(tflops), error=f"{error:.1e}", ok=ok
            )
        )
    return rows


# -------------------------------------------------------------------------------------------------------- MoE


def random_layer(experts: int) -> tuple[StreamedExperts, RowExponents, tuple[ExpertMatrix, ExpertMatrix]]:
    """Weights of a layer of the exact shape, in both forms."""
    matrices = []
    for rows in (2 * DIM, DIM):
        blocks = torch.randint(0, 256, (experts, rows, 90, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(116, 121, (experts, rows, 90), device="cuda").to(torch.uint8)
        matrices.append(ExpertMatrix(blocks, scales))
    biases = [torch.randn(experts, rows, device="cuda").bfloat16() * 0.5 for rows in (2 * DIM, DIM)]
    streamed = StreamedExperts.from_checkpoint(matrices[0], biases[0], matrices[1], biases[1])
    return streamed, RowExponents.from_checkpoint(*matrices), (matrices[0], matrices[1])


def moe_error(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: tuple[StreamedExperts, RowExponents, tuple[ExpertMatrix, ExpertMatrix]],
    out: Tensor,
) -> float:
    """Of the first 24 tokens, in float32; experts are widened one by one."""
    streamed, _, (gate_up, down) = layer
    worst_square, square = 0.0, 0.0
    for token in range(min(24, x.shape[0])):
        total = torch.zeros(DIM, device="cuda")
        for k in range(4):
            expert = slice(int(ids[token, k]), int(ids[token, k]) + 1)
            one = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
            total += reference.moe(
                x[token : token + 1].float(),
                one,
                weights[token : token + 1, k : k + 1].float(),
                dequantize_mxfp4(ExpertMatrix(gate_up.blocks[expert], gate_up.scales[expert])),
                streamed.gate_up_bias[expert].float(),
                dequantize_mxfp4(ExpertMatrix(down.blocks[expert], down.scales[expert])),
                streamed.down_bias[expert].float(),
            )[0]
        worst_square += float((out[token].float() - total).square().sum())
        square += float(total.square().sum())
    return float((worst_square / square) ** 0.5)


def moe_floor_us(tokens: int, experts: int) -> float:
    """Products at the rated e4m3 rate, or the bytes of the experts that are met."""
    met = experts * (1 - (1 - 4 / experts) ** tokens)
    compute = 2 * 4 * tokens * 3 * DIM * DIM / FP8_FLOPS
    return max(compute, met * 3 * DIM * DIM * MXFP4_BYTES / BYTES_PER_S) * 1e6


def moe_points(model: str, sizes: Sequence[int], layers: int, tiles: Sequence[int]) -> list[Record]:
    """Every chunk size of one model's shape: the whole op, its parts, and other tiles of tokens."""
    experts = EXPERTS[model]
    made = [random_layer(experts) for _ in range(layers)]
    workspace = MixedWorkspace(max(sizes), experts, torch.device("cuda"))
    scratch = RouteScratch(max(sizes), experts, torch.device("cuda"))
    gate = (torch.randn(experts, DIM, device="cuda") / DIM**0.5).bfloat16()
    gate_bias = torch.randn(experts, device="cuda").bfloat16()
    rows = []
    for tokens in sizes:
        x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16)
        routings = []
        for _ in made:
            ids = torch.randn(tokens, experts, device="cuda").topk(4, dim=-1).indices
            routings.append((ids, torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).bfloat16()))
        out = torch.full_like(x, float("nan"))
        mixed.moe_mixed(x, *routings[0], *made[0][:2], workspace, out)
        error = moe_error(x, *routings[0], made[0], out)
        whole = graph_time_us(
            [
                partial(mixed.moe_mixed, x, *routing, *layer[:2], workspace, out)
                for routing, layer in zip(routings, made, strict=True)
            ],
            replays=5,
        )
        tile = mixed.choose_tile(tokens, experts)
        parts: dict[str, float] = {}
        for size in dict.fromkeys((tile, *tiles)):
            route = partial(mixed.route, routings[0][0], workspace, size)
            quantise = partial(mixed.quantise, x, *routings[0], workspace, size)
            for launch in (route, quantise):
                launch()
            run = [partial(mixed.run_experts, *layer[:2], workspace, size) for layer in made]
            parts[f"experts {size}"] = graph_time_us(run, replays=5)
            if size == tile:
                parts["rank"] = graph_time_us([route], replays=3, rounds=4)
                parts["quantise"] = graph_time_us([quantise], replays=3, rounds=4)
                choose = partial(router.route, x, gate, gate_bias, 4)
                parts["router"] = graph_time_us([choose], replays=3, rounds=4)
                both = partial(route_ranked, x, gate, gate_bias, workspace, scratch, size)
                parts["router and rank"] = graph_time_us([both], replays=3, rounds=4)
        tflops = 2 * 4 * tokens * 3 * DIM * DIM / parts[f"experts {tile}"] / 1e6
        extra = {name: round(value, 1) for name, value in parts.items()}
        rows.append(
            record(
                "moe mixed",
                model,
                tokens,
                0,
                whole,
                moe_floor_us(tokens, experts),
                tflops=round(tflops),
                error=f"{error:.1e}",
                ok=error <= MOE_BOUND,
                tile=tile,
                **extra,
            )
        )
    return rows


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Measure, print and append records; returns 1 when a kernel is out of its error bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="attention,moe")
    parser.add_argument("--tiles", default="", help="tokens of a tile to try besides the one chosen")
    parser.add_argument("--tokens", default="512,1024,2048,8192", help="chunk sizes of the MoE")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--portable", action="store_true", help="time the Triton kernels too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Record] = []
    parts = options.parts.split(",")
    if "attention" in parts:
        for context in _numbers(options.contexts):
            rows += attention_point(context, context, None, options.portable)
            rows += attention_point(context, context, WINDOW, options.portable)
    for model, layers in (("gpt-oss-20b", 3), ("gpt-oss-120b", 2)):
        if "moe" in parts or model in parts:
            rows += moe_points(model, _numbers(options.tokens), layers, _numbers(options.tiles))
            torch.cuda.empty_cache()
    if options.out is not None:
        append_records(options.out, rows)
    return int(any(row.extra.get("ok") is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
