"""The MoE kernels on one GPU: error against the plain op, time a layer, and ratio to the memory floor.

Run: ``python -m antiphon.benchmarks.kernels_moe [--tune] [--columns N] [--out FILE [--commit ID]]``. Weights
and routings rotate over several layers inside one CUDA graph, so that L2 serves none of them. With
``--columns`` 1536, 768 or 384, decode steps alone, of one of 2, 4 or 8 ranks that split every expert.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.benchmarks.timing import graph_time_us, relative_error
from antiphon.kernels import reference
from antiphon.kernels.moe import decode, prefill
from antiphon.kernels.moe.build import LIBRARY, SPLIT_LIBRARY
from antiphon.kernels.moe.decode import LaunchPlan, MoeWorkspace, Routing
from antiphon.kernels.moe.fp8_weights import Fp8Experts, Fp8Matrix, widen_matrix
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.streamed import DIM, SPLIT_COLUMNS, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

BYTES_PER_S = 4.8e12
FP8_FLOPS = 1979e12
COLUMN_BYTES = 3 * (DIM // 2 + DIM // 32)
"""Of one column of an expert's intermediate size in MXFP4."""
BOUND = 5e-3
FP8_BOUND = 4e-2
Record = dict[str, object]


@dataclass(frozen=True)
class Layer:
    """One layer's experts, its router, and a workspace of its own."""

    experts: StreamedExperts
    router: Tensor
    router_bias: Tensor
    workspace: MoeWorkspace


def random_matrix(experts: int, rows: int, columns: int = DIM) -> ExpertMatrix:
    """Random codes; scales such that activations keep their size."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, device="cuda")
    scales = torch.randint(117, 121, (experts, rows, columns // 32), device="cuda").to(torch.uint8)
    return ExpertMatrix(blocks, scales)


def random_layer(experts: int, max_tokens: int, columns: int) -> tuple[Layer, ExpertMatrix, ExpertMatrix]:
    """A layer and its checkpoint matrices, of so many columns of the intermediate size."""
    gate_up, down = random_matrix(experts, 2 * columns), random_matrix(experts, DIM, columns)
    gate_up_bias = torch.randn(experts, 2 * columns, device="cuda") * 0.5
    down_bias = torch.randn(experts, DIM, device="cuda") * 0.5
    return (
        Layer(
            StreamedExperts.from_checkpoint(gate_up, gate_up_bias, down, down_bias),
            (torch.randn(experts, DIM, device="cuda") / 54).bfloat16(),
            torch.zeros(experts, device="cuda").bfloat16(),
            MoeWorkspace(max_tokens, experts, torch.device("cuda")),
        ),
        gate_up,
        down,
    )


def layer_error(
    layer: Layer, gate_up: ExpertMatrix, down: ExpertMatrix, x: Tensor, routing: Routing
) -> float:
    """Relative L2 of the whole layer against the plain op in float32, poisoned first."""
    layer.workspace.hidden.fill_(0x7F)  # NaN
    layer.workspace.partial.fill_(float("nan"))
    out = decode.moe_streamed(routing, layer.experts, layer.workspace, torch.full_like(x, float("nan")))
    used, local = torch.unique(routing.expert_ids, return_inverse=True)
    plain = reference.moe(
        x.float(),
        local,
        routing.expert_weights.float(),
        dequantize_mxfp4(ExpertMatrix(gate_up.blocks[used], gate_up.scales[used])),
        layer.experts.gate_up_bias[used].float(),
        dequantize_mxfp4(ExpertMatrix(down.blocks[used], down.scales[used])),
        layer.experts.down_bias[used].float(),
    )
    return relative_error(out, plain)


def whole(x: Tensor, layer: Layer, plan: LaunchPlan, out: Tensor) -> None:
    """Route, both projections, combine."""
    routing = decode.route_grouped(x, layer.router, layer.router_bias, layer.workspace, plan)
    decode.moe_streamed(routing, layer.experts, layer.workspace, out)


def measure(layers: list[Layer], tokens: int, plan: LaunchPlan, rounds: int) -> dict[str, float]:
    """Times of the parts in microseconds a layer, and the bytes' floor."""
    inputs = [torch.randn(tokens, DIM, device="cuda").bfloat16() for _ in layers]
    out = torch.empty(tokens, DIM, device="cuda", dtype=torch.bfloat16)
    distinct = 0
    for layer, x in zip(layers, inputs, strict=True):
        routing = decode.route_grouped(x, layer.router, layer.router_bias, layer.workspace, plan)
        distinct += len(set(routing.expert_ids.flatten().tolist()))
    steps = zip(inputs, layers, strict=True)
    return {
        "layer": graph_time_us([partial(whole, x, layer, plan, out) for x, layer in steps], rounds=rounds),
        "route": graph_time_us(
            [
                partial(decode.route_grouped, x, layer.router, layer.router_bias, layer.workspace, plan)
                for x, layer in zip(inputs, layers, strict=True)
            ],
            rounds=rounds,
        ),
        "floor": distinct / len(layers) * layers[0].experts.columns * COLUMN_BYTES / BYTES_PER_S * 1e6,
    }


def decode_point(
    model: str,
    layers: list[Layer],
    matrices: tuple[ExpertMatrix, ExpertMatrix],
    tokens: int,
    plan: LaunchPlan,
) -> Record:
    """Check and time one batch size under one plan; prints a row."""
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    first = layers[0]
    routing = decode.route_grouped(x, first.router, first.router_bias, first.workspace, plan)
    error = layer_error(first, *matrices, x, routing)
    times = measure(layers, tokens, plan, rounds=max(1, 64 // (len(layers) * tokens)))
    print(
        f"{model:5s} {first.experts.columns:4d} columns B={tokens:<4d} tile={plan.token_tile:<2d} "
        f"pdl={int(plan.overlap)} err {error:8.1e} {'ok ' if error <= BOUND else 'BAD'}"
        f" layer {times['layer']:7.1f} route {times['route']:5.1f}"
        f" floor {times['floor']:6.1f} us  {times['floor'] / times['layer']:.2f}",
        flush=True,
    )
    return {
        "bench": "kernel",
        "kernel": "moe_streamed",
        "expert_columns": first.experts.columns,
        "resident_weights": "mxfp4",
        "model": model,
        "batch": tokens,
        "plan": asdict(plan),
        "error": error,
        "ok": error <= BOUND,
        "value": times["layer"],
        "parts": times,
        "unit": "us",
        "floor": times["floor"],
    }


def plans_to_try(tokens: int, experts: int, tune: bool) -> list[LaunchPlan]:
    """The default plan, and with ``tune`` its neighbours, one property changed at a time."""
    default = decode.plan_launch(tokens, experts)
    if not tune:
        return [default]
    tiles = [tile for tile in decode.TOKEN_TILES if tile != default.token_tile and tile <= max(8, tokens)]
    return [
        default,
        replace(default, overlap=False),
        *(replace(default, token_tile=tile) for tile in tiles),
    ]


def decode_table(
    model: str, experts: int, layer_count: int, batches: tuple[int, ...], tune: bool, columns: int = DIM
) -> list[Record]:
    """Every batch size of one model's shape."""
    built = [random_layer(experts, max(batches), columns) for _ in range(layer_count)]
    layers = [layer for layer, _, _ in built]
    matrices = built[0][1:]
    return [
        decode_point(model, layers, matrices, tokens, plan)
        for tokens in batches
        for plan in plans_to_try(tokens, experts, tune)
    ]


def fp8_error(x: Tensor, ids: Tensor, weights: Tensor, experts: Fp8Experts, workspace: Fp8Workspace) -> float:
    """Relative L2 of the whole layer against the plain op in float32, over the first 256 tokens."""
    workspace.hidden.fill_(0x7F)  # NaN
    workspace.rows.fill_(float("nan"))
    out = prefill.moe_fp8(x, ids, weights, experts, workspace, torch.full_like(x, float("nan")))
    if out.isnan().any():
        return float("nan")
    used, local = torch.unique(ids[:256], return_inverse=True)

    def widened(matrix: Fp8Matrix, rows: int) -> Tensor:
        return widen_matrix(Fp8Matrix(matrix.values[used], matrix.scales[used], 0), rows)

    plain = reference.moe(
        x[:256].float(),
        local,
        weights[:256].float(),
        widened(experts.gate_up, 2 * DIM),
        experts.gate_up_bias[used].float(),
        widened(experts.down, DIM),
        experts.down_bias[used].float(),
    )
    return relative_error(out[:256], plain)


def prefill_point(
    model: str, layers: list[Fp8Experts], workspace: Fp8Workspace, all_experts: int, tokens: int
) -> Record:
    """Check and time one chunk size; prints a row."""
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids = torch.randn(tokens, all_experts, device="cuda").topk(4, dim=-1).indices
    weights = torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).bfloat16()
    error = fp8_error(x, ids, weights, layers[0], workspace)
    parts: dict[str, Sequence[Callable[[], object]]] = {
        "rank": [partial(prefill.route, ids, workspace)] * 8,
        "quantise": [partial(prefill.quantise, x, ids, weights, workspace)] * 8,
        "experts": [partial(prefill.run_experts, layer, workspace) for layer in layers],
        "layer": [partial(prefill.moe_fp8, x, ids, weights, layer, workspace) for layer in layers],
    }
    times = {name: graph_time_us(launches, replays=5) for name, launches in parts.items()}
    operations = 2 * tokens * 4 * 3 * DIM * DIM
    weight_bytes = len(set(ids.flatten().tolist())) * 3 * DIM * DIM
    floor = max(operations / FP8_FLOPS, weight_bytes / BYTES_PER_S) * 1e6
    print(
        f"{model:5s} T={tokens:<6d} fp8 err {error:8.1e} {'ok ' if error <= FP8_BOUND else 'BAD'}"
        f" experts {times['experts']:8.1f} us ({operations / times['experts'] / 1e6:6.0f} TFLOPS)"
        f" layer {times['layer']:8.1f} rank {times['rank']:5.1f} quantise {times['quantise']:6.1f}"
        f" floor {floor:7.1f} us  {floor / times['layer']:.2f}",
        flush=True,
    )
    return {
        "bench": "kernel",
        "kernel": "moe_fp8",
        "resident_weights": "fp8 128x128",
        "model": model,
        "input_tokens": tokens,
        "error": error,
        "ok": error <= FP8_BOUND,
        "value": times["layer"],
        "parts": times,
        "unit": "us",
        "floor": floor,
    }


def prefill_table(model: str, experts: int, layer_count: int, chunks: tuple[int, ...]) -> list[Record]:
    """Every chunk size of one model's shape, resident FP8 weights."""
    layers = []
    for _ in range(layer_count):
        layers.append(
            Fp8Experts.from_checkpoint(
                random_matrix(experts, 2 * DIM),
                torch.randn(experts, 2 * DIM, device="cuda") * 0.5,
                random_matrix(experts, DIM),
                torch.randn(experts, DIM, device="cuda") * 0.5,
            )
        )
    workspace = Fp8Workspace(max(chunks), experts, torch.device("cuda"))
    return [prefill_point(model, layers, workspace, experts, tokens) for tokens in chunks]


def stamped(rows: list[Record], commit: str | None, ranks: int = 1) -> list[Record]:
    """The rows with what they were measured on; the commit is the checkout's unless it is given."""
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commit = git.stdout.strip()
    common: Record = {
        "layout": f"TP{ranks} EP1",
        "device": torch.cuda.get_device_name(),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "peer": None,
    }
    return [{**common, **row} for row in rows]


def main() -> None:
    """Build the library, run every point; exit with 1 when one is out of its error bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    parser.add_argument("--tune", action="store_true", help="also time other launch plans")
    parser.add_argument(
        "--columns", type=int, choices=(DIM, *SPLIT_COLUMNS), default=DIM, help="that a rank holds"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    LIBRARY.build()
    split = options.columns != DIM
    if split:
        SPLIT_LIBRARY.build()
    ranks = round(DIM / options.columns)  # and as many times the layers, or L2 would serve some of them
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    rows = decode_table("20b", 32, 6 * ranks, batches, options.tune, options.columns)
    torch.cuda.empty_cache()
    rows += decode_table("120b", 128, 3 * ranks, (1, 8, 32, 64, 128, 256), options.tune, options.columns)
    torch.cuda.empty_cache()
    if not split:
        rows += prefill_table("20b", 32, 2, (512, 1024, 2048, 4096, 8192))
        torch.cuda.empty_cache()
        rows += prefill_table("120b", 128, 1, (1024, 2048, 8192))
    if options.out:
        options.out.write_text(json.dumps(stamped(rows, options.commit, ranks), indent=1))
    if not all(row.get("ok", True) for row in rows):
        raise SystemExit("a kernel is out of its error bound")


if __name__ == "__main__":
    main()
