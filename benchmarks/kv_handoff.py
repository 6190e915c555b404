"""How fast the KV of a prompt moves from one worker's pages into another's: three rates from one run.

1. ``limit``: a plain copy between the two memories, nothing but bytes.
2. ``floor``: NIXL alone, one write of descriptors of 4 MiB.
3. ``value``: the real hand-off from pages to pages, notifications and all, every layer group of every chunk,
   through the very objects that workers use, until the receiver has been told of the last. ``--way`` is
   theirs of one host (``mapped``), of several (``staged``), or every run of pages by NIXL (``pages``).

Each of them with a sending GPU that has just computed, as after a prefill; the third right behind another
hand-off, and once more after a pause in which the threads of both sides rested. For prompts that a prefill
would compute meanwhile, orders become ready at the pace of that prefill, and what is reported is the tail
after the last layer and the share of the transfer that lay behind compute.

    python -m antiphon.benchmarks.kv_handoff --model gpt-oss-20b --tokens 1024,8192 --device cuda
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import get_args

import torch

from antiphon.benchmarks.kv_sender import Sender
from antiphon.benchmarks.kv_sides import MIB, Plan, Way, raw_bytes, receive
from antiphon.benchmarks.records import Record, append_records, checkout_commit, now
from antiphon.kernels.ipc.run_copy import READY_BLOCKS, WAITING_BLOCKS
from antiphon.model.config import preset

DESCRIPTOR_BYTES = 4 * MIB


def plain_rate(plan: Plan, sender: Sender, total: int) -> float:
    """Bytes per second of a copy between the two memories in one process."""
    source = torch.ones(total, dtype=torch.uint8, device=plan.device_of(0))
    target = torch.empty(total, dtype=torch.uint8, device=plan.device_of(1))
    seconds = []
    for _ in range(plan.repeats + 1):
        _synchronise(plan)
        sender.wake_device()
        begin = time.perf_counter()
        target.copy_(source)
        _synchronise(plan)
        seconds.append(time.perf_counter() - begin)
    return total / statistics.median(seconds[1:])


def measure(plan: Plan, compute_ms: dict[int, float]) -> list[Record]:
    """All rates of all prompts.

    Args:
        compute_ms: what a prefill of so many tokens takes, for those whose overlap is measured.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, plan), daemon=True)
    process.start()
    records = []
    sender = Sender(plan, pipe)
    limit = plain_rate(plan, sender, raw_bytes(plan))
    floor = sender.nixl_rate(raw_bytes(plan), DESCRIPTOR_BYTES)
    print(f"plain copy {limit / 1e9:.1f} GB/s, NIXL in 4 MiB {floor / 1e9:.1f} GB/s", flush=True)
    pipe.send([])
    pipe.recv()
    for tokens in plan.tokens:
        sender.hand_off(tokens, 0.0)  # connections, kernels, the allocator
        paused, alone = [], []
        for _ in range(plan.repeats):
            paused.append(sender.hand_off(tokens, 0.0))
            alone.append(sender.hand_off(tokens, 0.0, after_a_pause=False))
        sender.check(tokens)
        best = sorted(alone, key=lambda outcome: outcome.seconds)[len(alone) // 2]
        rate = best.total_bytes / best.seconds
        extra: dict[str, object] = {
            "limit": limit / 1e9,
            "bytes": best.total_bytes,
            "ms": best.seconds * 1e3,
            "ms_after_a_pause": statistics.median(outcome.seconds for outcome in paused) * 1e3,
            "descriptors": best.descriptors,
            "median_descriptor_bytes": best.median_descriptor_bytes,
            "layer_groups": plan.layer_groups,
            "way": plan.way,
        }
        if plan.way == "staged":
            extra |= {"staging_slots": plan.slots, "slot_mib": plan.slot_mib}
        if plan.way == "mapped":
            extra["blocks"] = plan.blocks or f"{WAITING_BLOCKS}, of computed pages {READY_BLOCKS}"
        if tokens in compute_ms:
            behind = [sender.hand_off(tokens, compute_ms[tokens] / 1e3) for _ in range(plan.repeats)]
            tail = statistics.median(outcome.tail_ms for outcome in behind)
            extra |= {
                "compute_ms": compute_ms[tokens],
                "tail_ms": tail,
                "hidden_share": max(0.0, 1 - tail / (best.seconds * 1e3)),
            }
        print(f"{tokens} tokens: {rate / 1e9:.1f} GB/s, {extra}", flush=True)
        records.append(_record(plan, tokens, rate / 1e9, floor / 1e9, extra))
    sender.close()
    process.join(30)
    return records


def _record(plan: Plan, tokens: int, value: float, floor: float, extra: dict[str, object]) -> Record:
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    return Record(
        *("transfer", plan.model, "TP1", device, checkout_commit(), now(), value, "GB/s"),
        input_tokens=tokens,
        kernel=plan.way_name,
        floor=floor,
        extra=extra,
    )


def _synchronise(plan: Plan) -> None:
    if plan.device == "cuda":
        for side in (0, 1):
            torch.cuda.synchronize(plan.device_of(side))


def main() -> None:
    """Measure and write records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", default="1024,8192,32768,131072")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--layer-groups", type=int, help="default: 4, or as many as the model has layers for")
    parser.add_argument("--way", choices=get_args(Way), help="default: mapped on GPUs, staged on the CPU")
    parser.add_argument("--slots", type=int, default=4, help="of --way staged")
    parser.add_argument("--slot-mib", type=int, default=64, help="of --way staged")
    parser.add_argument("--blocks", default="", help="of --way mapped, such as 8,32 to compare")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compute-ms", default="", help="tokens:milliseconds of a prefill, comma-separated")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    way: Way = options.way or ("mapped" if options.device == "cuda" else "staged")
    if way == "mapped" and options.device == "cpu":
        parser.error("--way mapped: only GPUs map the pages of another process")
    shape = preset(options.model)
    fewest = min(len(shape.full_layers), len(shape.sliding_layers))
    layer_groups: int = options.layer_groups or min(4, fewest)
    if not 1 <= layer_groups <= fewest:
        parser.error(f"--layer-groups {layer_groups}: {options.model} has layers for 1 to {fewest}")
    pairs = [pair.split(":") for pair in options.compute_ms.split(",") if pair]
    for blocks in options.blocks.split(",") if way == "mapped" else ("",):
        plan = Plan(
            options.model,
            options.device,
            tuple(int(tokens) for tokens in options.tokens.split(",")),
            options.chunk_tokens,
            layer_groups,
            way,
            options.slots,
            options.slot_mib,
            int(blocks) if blocks else None,
            options.repeats,
        )
        records = measure(plan, {int(tokens): float(value) for tokens, value in pairs})
        if options.out:
            append_records(options.out, records)


if __name__ == "__main__":
    main()
