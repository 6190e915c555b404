"""Attention and dense kernels on one GPU: error against the plain op, time, and ratio to the memory floor.

Run: ``python -m antiphon.benchmarks.kernels_dense [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.benchmarks.timing import graph_time_us, relative_error
from antiphon.kernels import reference
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.dense import norm, rope, skinny
from antiphon.kernels.reference import PagedSequences

Q, G, D, S, H = 64, 8, 64, 64, 2880
BYTES_PER_S = 4.8e12
FLOPS = 990e12
Record = dict[str, object]


def paged(batch: int, context: int, queries: int, group_layers: int = 1) -> tuple[Tensor, PagedSequences]:
    """A random cache of ``batch`` sequences in shuffled pages, and the views of them."""
    pages = -(-context // S)
    total = batch * pages + 1
    cache = torch.randn(total, group_layers, G, 2, S, D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(total - 1, device="cuda")[: batch * pages].reshape(batch, pages).int()
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    slot = torch.zeros(batch * queries, dtype=torch.int64, device="cuda")
    return cache[:, 0], PagedSequences(table, starts, lengths, slot)


def record(name: str, shape: str, error: float, bound: float, us: float, floor_us: float) -> Record:
    """One row; prints it and raises when the error is out of bounds."""
    ok = error <= bound
    print(
        f"{name:28s} {shape:22s} err {error:8.1e} {'ok' if ok else 'BAD'} {us:9.1f} us "
        f" floor {floor_us:8.1f}  "
        f"{floor_us / us:5.2f}",
        flush=True,
    )
    return {
        "bench": "kernel",
        "kernel": name,
        "shape": shape,
        "error": error,
        "ok": ok,
        "value": us,
        "unit": "us",
        "floor": floor_us,
    }


def decode_attention(batch: int, context: int, splits: tuple[int | None, ...], pdl: bool) -> list[Record]:
    """Full and sliding decode attention at one point."""
    sets = max(1, min(8, int(2e8 / (batch * context * 2048)) + 1))
    caches = [paged(batch, context, 1) for _ in range(sets)]
    query = torch.randn(batch, Q, D, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(Q, device="cuda")
    rows = []
    for count in splits:
        kernel = DecodeAttention(batch, Q, G, D, query.device, splits=count, pdl=pdl)
        out = torch.full_like(query, float("nan"))
        expected = reference.paged_attention(
            query.float(),
            caches[0][0].float() if batch * context < 3e5 else caches[0][0],
            caches[0][1],
            sinks,
            None,
            0.125,
        )
        kernel.full(query, *caches[0], sinks, 0.125, out)
        error = relative_error(out, expected)
        us = graph_time_us(
            [partial(kernel.full, query, c, s, sinks, 0.125, out) for c, s in caches], rounds=10
        )
        rows.append(
            record(
                "decode full" + (" pdl" if pdl else ""),
                f"B={batch} ctx={context} s={kernel.splits}",
                error,
                5e-3,
                us,
                batch * context * 2048 / BYTES_PER_S * 1e6,
            )
        )
    out = torch.full_like(query, float("nan"))
    kernel.sliding(query, *caches[0], sinks, 128, 0.125, out)
    error = relative_error(
        out, reference.paged_attention(query.float(), caches[0][0], caches[0][1], sinks, 128, 0.125)
    )
    us = graph_time_us(
        [partial(kernel.sliding, query, c, s, sinks, 128, 0.125, out) for c, s in caches], rounds=10
    )
    rows.append(
        record(
            "decode sliding" + (" pdl" if pdl else ""),
            f"B={batch} ctx={context}",
            error,
            5e-3,
            us,
            batch * 128 * 2048 / BYTES_PER_S * 1e6,
        )
    )
    return rows


def prefill(tokens: int, context: int, tuning: bool = False) -> list[Record]:
    """Prefill attention of ``tokens`` queries at the end of ``context`` keys."""
    layer, sequences = paged(1, context, tokens)
    query = torch.randn(tokens, Q, D, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(Q, device="cuda")
    rows = []
    for window in (None, 128):
        run: partial[Tensor] = partial(
            prefill_attention,
            query,
            layer,
            sequences,
            sinks,
            window,
            0.125,
            tokens,
            out=torch.full_like(query, float("nan")),
        )
        out = run()
        error = 0.0
        if tokens <= 2048:
            error = relative_error(
                out, reference.paged_attention(query, layer, sequences, sinks, window, 0.125)
            )
        us = graph_time_us([run], replays=5)
        if window is None and tuning:
            for block_tokens, warps, stages in (
                (16, 4, 3),
                (16, 8, 3),
                (16, 8, 4),
                (8, 4, 3),
                (8, 4, 5),
                (32, 8, 3),
            ):
                tuned = partial(run, block_tokens=block_tokens, warps=warps, stages=stages)
                print(
                    f"  {block_tokens=} {warps=} {stages=}: {graph_time_us([tuned], replays=5):.1f} us",
                    flush=True,
                )
        keys = tokens * (context - tokens / 2) if window is None else tokens * min(window, context)
        rows.append(
            record(
                "prefill " + ("full" if window is None else "sliding"),
                f"T={tokens} ctx={context}",
                error,
                5e-3,
                us,
                keys * 4 * Q * D / FLOPS * 1e6,
            )
        )
    return rows


def projections(tokens: int, pdl: bool) -> list[Record]:
    """The skinny projections against the plain ops."""
    bf16 = torch.bfloat16
    qkv = [torch.randn(5120, H, device="cuda", dtype=bf16) / 54 for _ in range(8)]
    proj = [torch.randn(H, 4096, device="cuda", dtype=bf16) / 64 for _ in range(8)]
    qkv_bias, out_bias = (
        torch.randn(5120, device="cuda", dtype=bf16),
        torch.randn(H, device="cuda", dtype=bf16),
    )
    x = torch.randn(tokens, H, device="cuda", dtype=bf16) * 3
    layer, _ = paged(1, 4096, 1)
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rope.rotation_table(inv_freq.cuda(), concentration, 16384)
    positions = torch.randint(0, 16384, (tokens,), device="cuda")
    slot = torch.randperm(4096, device="cuda")[:tokens].contiguous()
    query = torch.full((tokens, Q, D), float("nan"), device="cuda", dtype=bf16)

    def run(weight: Tensor) -> Tensor:
        return skinny.qkv_rope(x, weight, qkv_bias, positions, slot, table, layer, query, pdl)

    run(qkv[0])
    plain = reference.linear(x.float(), qkv[0].float(), qkv_bias.float())
    heads = plain.view(tokens, Q + 2 * G, D)
    angle = positions.double()[:, None] * inv_freq.cuda().double()
    cos, sin = (angle.cos() * concentration)[:, None].float(), (angle.sin() * concentration)[:, None].float()
    first, second = heads[:, : Q + G].chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    error = relative_error(query, rotated[:, :Q])
    stored = layer[slot // S, :, :, slot % S]
    error = max(
        error,
        relative_error(stored[:, :, 0], rotated[:, Q:]),
        relative_error(stored[:, :, 1], heads[:, Q + G :]),
    )
    suffix = " pdl" if pdl else ""
    floor = 5120 * H * 2 / BYTES_PER_S * 1e6
    us = graph_time_us([partial(run, w) for w in qkv], rounds=10)
    rows = [record("qkv+rope+write" + suffix, f"T={tokens}", error, 1e-2, us, floor)]
    attended = torch.randn(tokens, 4096, device="cuda", dtype=bf16)
    residual = x.clone()
    skinny.output_projection_(attended, proj[0], out_bias, residual, pdl)
    expected = x.float() + reference.linear(attended.float(), proj[0].float(), out_bias.float())
    rows.append(
        record(
            "o+bias+residual" + suffix,
            f"T={tokens}",
            relative_error(residual, expected),
            1e-2,
            graph_time_us(
                [partial(skinny.output_projection_, attended, w, out_bias, residual, pdl) for w in proj],
                rounds=10,
            ),
            4096 * H * 2 / BYTES_PER_S * 1e6,
        )
    )
    return rows


def unembedding(tokens: int) -> list[Record]:
    """Logits over the whole vocabulary."""
    bf16 = torch.bfloat16
    weight = torch.randn(201088, H, device="cuda", dtype=bf16) / 54
    x = torch.randn(tokens, H, device="cuda", dtype=bf16)
    out = torch.full((tokens, 201088), float("nan"), device="cuda")
    skinny.logits(x, weight, out)
    expected = x.float() @ weight.float().T
    us = graph_time_us([partial(skinny.logits, x, weight, out)])
    return [
        record(
            "logits",
            f"T={tokens}",
            relative_error(out, expected),
            1e-2,
            us,
            201088 * H * 2 / BYTES_PER_S * 1e6,
        )
    ]


def norms_and_rope(tokens: int) -> list[Record]:
    """The Triton norm and the rotation of a whole chunk."""
    bf16 = torch.bfloat16
    x, delta = (torch.randn(tokens, H, device="cuda", dtype=bf16) for _ in range(2))
    weight = torch.rand(H, device="cuda").to(bf16) + 0.5
    out = torch.full_like(x, float("nan"))
    norm.rms_norm(x, weight, 1e-5, out)
    rows = [
        record(
            "rms_norm",
            f"T={tokens}",
            relative_error(out, reference.rms_norm(x, weight, 1e-5)),
            1e-2,
            graph_time_us([partial(norm.rms_norm, x, weight, 1e-5, out)], rounds=20),
            tokens * H * 4 / BYTES_PER_S * 1e6,
        )
    ]
    rows.append(
        record(
            "add_rms_norm",
            f"T={tokens}",
            0.0,
            1e-2,
            graph_time_us([partial(norm.add_rms_norm_, delta, x, weight, 1e-5, out)], rounds=20),
            tokens * H * 8 / BYTES_PER_S * 1e6,
        )
    )
    inv_freq, concentration = reference.yarn_inv_freq(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rope.rotation_table(inv_freq.cuda(), concentration, 16384)
    layer, _ = paged(1, max(tokens, 64), 1)
    qkv = torch.randn(tokens, 5120, device="cuda", dtype=bf16)
    positions, slot = (torch.arange(tokens, device="cuda") for _ in range(2))
    query = torch.full((tokens, Q, D), float("nan"), device="cuda", dtype=bf16)
    rope.rope_and_write(qkv, positions, slot, table, layer, Q, query)
    expected = reference.rope(qkv.view(tokens, -1, D)[:, :Q], positions, inv_freq.cuda(), concentration)
    rows.append(
        record(
            "rope+write",
            f"T={tokens}",
            relative_error(query, expected),
            1e-2,
            graph_time_us(
                [partial(rope.rope_and_write, qkv, positions, slot, table, layer, Q, query)], rounds=10
            ),
            tokens * 5120 * 4 / BYTES_PER_S * 1e6,
        )
    )
    return rows


def main() -> None:
    """Run every point; exit with 1 when one is out of its error bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true", help="also time other launch shapes")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Record] = []
    for pdl in (False, True):
        for tokens in (1, 8, 16):
            rows += projections(tokens, pdl)
    for tokens in (1, 8, 16):
        rows += unembedding(tokens)
    for tokens in (1, 8, 1024, 8192):
        rows += norms_and_rope(tokens)
    for batch, context, splits in (
        (1, 8192, (16, 32, 64)),
        (8, 8192, (3, 5, 8)),
        (32, 8192, (1, 2)),
        (128, 8192, (1,)),
        (1, 32768, (32, 64, 128)),
        (32, 32768, (1,)),
    ):
        rows += decode_attention(batch, context, splits, pdl=False)
        if batch <= 8:
            rows += decode_attention(batch, context, splits, pdl=True)
    for tokens, context in ((1024, 1024), (1000, 4161), (8192, 8192), (2048, 32768)):
        rows += prefill(tokens, context, options.tune)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    if not all(row["ok"] for row in rows):
        raise SystemExit("a kernel is out of its error bound")


if __name__ == "__main__":
    main()
