"""FP8 products of chunks on one GPU, a kernel at a time: resident experts by tile, and the projections.

The projections stand beside cuBLAS's in bf16 and in FP8 with the same blocks of scales, neither of which
quantises its input; ``products`` is ours without that too. Weights rotate over several layers inside one CUDA
graph.

Run: ``python -m antiphon.benchmarks.kernels_chunk_fp8 [--out FILE]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from antiphon.benchmarks.kernels_moe import fp8_error, random_matrix
from antiphon.benchmarks.kernels_prefill import BYTES_PER_S, FP8_FLOPS, MOE_BOUND, record
from antiphon.benchmarks.records import Record, append_records
from antiphon.benchmarks.timing import graph_time_us, relative_error
from antiphon.kernels.dense import fp8_projection
from antiphon.kernels.dense.fp8_projection import Fp8Projection, ProjectionWorkspace, project
from antiphon.kernels.moe import prefill
from antiphon.kernels.moe.fp8_weights import Fp8Experts
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.streamed import DIM

SHAPES = {"qkv": (5120, 2880), "out": (2880, 4096)}
BLOCK = 128


def expert_points(sizes: Sequence[int], layers: int) -> list[Record]:
    """Resident experts of the 20b shape, every tile at every chunk size."""
    experts, device = 32, torch.device("cuda")
    made = []
    for _ in range(layers):
        biases = [torch.randn(experts, rows, device=device) * 0.5 for rows in (2 * DIM, DIM)]
        matrices = [random_matrix(experts, rows) for rows in (2 * DIM, DIM)]
        made.append(Fp8Experts.from_checkpoint(matrices[0], biases[0], matrices[1], biases[1]))
    rows = []
    for tile in prefill.TILES:
        workspace = Fp8Workspace(max(sizes), experts, device, tile=tile)
        for tokens in sizes:
            x = torch.randn(tokens, DIM, device=device).bfloat16()
            ids = torch.randn(tokens, experts, device=device).topk(4, dim=-1).indices
            weights = torch.softmax(torch.randn(tokens, 4, device=device), -1).bfloat16()
            error = fp8_error(x, ids, weights, made[0], workspace)
            us = graph_time_us([partial(prefill.run_experts, layer, workspace) for layer in made], replays=5)
            operations = 2 * tokens * 4 * 3 * DIM * DIM
            floor = max(operations / FP8_FLOPS, experts * 3 * DIM * DIM / BYTES_PER_S) * 1e6
            name, tflops = f"experts fp8 {tile}", round(operations / us / 1e6)
            facts: dict[str, object] = {"tflops": tflops, "error": f"{error:.1e}", "ok": error <= MOE_BOUND}
            rows.append(record(name, "gpt-oss-20b", tokens, 0, us, floor, **facts))
    return rows


def cublas_fp8(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], Tensor]:
    """The same product by cuBLAS, e4m3 with scales of 1 x 128 and 128 x 128; only its time is looked at."""
    narrow, matrix = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    columns = -(-x.shape[1] // BLOCK)
    # Scales of tokens lie one after the other for each block; those of weights in runs of a multiple of four.
    x_scale = torch.ones(columns, x.shape[0], device=x.device).t()
    blocks = torch.ones(-(-weight.shape[0] // BLOCK), -(-columns // 4) * 4, device=x.device).t()
    return partial(
        scaled_mm,
        *(narrow, matrix, x_scale, ScalingType.BlockWise1x128, blocks, ScalingType.BlockWise128x128),
        bias=bias,
        output_dtype=torch.bfloat16,
    )


def projection_points(sizes: Sequence[int], layers: int) -> list[Record]:
    """Both projections, every way."""
    device = torch.device("cuda")
    rows = []
    workspace = ProjectionWorkspace(max(sizes), device)
    for name, (outputs, columns) in SHAPES.items():
        weights = [
            (torch.randn(outputs, columns, device=device) / columns**0.5).bfloat16() for _ in range(layers)
        ]
        bias = torch.randn(outputs, device=device).bfloat16()
        ours = [Fp8Projection.from_weight(weight, bias) for weight in weights]
        for tokens in sizes:
            x = torch.randn(tokens, columns, device=device).bfloat16()
            out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=device)
            linear = torch.nn.functional.linear
            ways: dict[str, list[Callable[[], object]]] = {
                "bf16 cuBLAS": [partial(linear, x, weight, bias) for weight in weights]
            }
            for tile in fp8_projection.TILES:
                ways[f"fp8 {tile}"] = [partial(project, x, each, workspace, out, tile) for each in ours]
            floor = 2 * tokens * outputs * columns / FP8_FLOPS * 1e6
            error = relative_error(
                project(x, ours[0], workspace), linear(x.float(), weights[0].float(), bias.float())
            )
            for way, launches in ways.items():
                us = graph_time_us(launches, replays=5)
                facts: dict[str, object] = {"tflops": round(2 * tokens * outputs * columns / us / 1e6)}
                if way.startswith("fp8"):
                    facts |= {"error": f"{error:.1e}", "ok": error <= MOE_BOUND}
                rows.append(record(f"{name} {way}", "gpt-oss", tokens, 0, us, floor, **facts))
            try:
                us = graph_time_us([cublas_fp8(x, weight, bias) for weight in weights], replays=5)
            except (RuntimeError, ValueError) as refusal:
                print(
                    f"{name} fp8 cuBLAS refuses {tokens} tokens: {str(refusal).splitlines()[0]}", flush=True
                )
                continue
            rows.append(record(f"{name} fp8 cuBLAS", "gpt-oss", tokens, 0, us, floor))
    return rows


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Measure, print and append records; returns 1 when a kernel is out of its error bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=_numbers, default="512,1024,2048,4096,8192")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = expert_points(options.tokens, layers=3)
    torch.cuda.empty_cache()
    rows += projection_points([tokens for tokens in options.tokens if tokens >= 1024], layers=4)
    if options.out is not None:
        append_records(options.out, rows)
    return int(any(row.extra.get("ok") is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
