"""Everything that two GPUs of one host are needed for, in one go of a few minutes.

Each part is a process of its own with a limit of its own, so that one that hangs or breaks leaves the others
their time; what a part measured before that is kept. Ends with 1 if any part did.

    python -m antiphon.benchmarks.two_gpus --out results
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from antiphon.benchmarks.parts import Part, build_kernels, module, run_all


def parts(out: Path) -> tuple[Part, ...]:
    """In the order of what is most needed."""
    transfer = out / "transfer.json"
    ranks = out / "rank_steps.json"
    hand_off = ("--compute-ms", "8192:80,32768:400", "--out", str(transfer))
    direct = ("--tokens", "8192", "--slots", "0", "--out", str(out / "transfer_direct.json"))
    large = ("--tokens", "8192", "--slot-mib", "64", "--out", str(out / "transfer_slot_64.json"))
    small = ("--tokens", "8192", "--slot-mib", "8", "--out", str(out / "transfer_slot_8.json"))
    quick = ("--batches", "1,8,32,128", "--prefill", "1024,8192", "--out", str(ranks))
    return (
        Part("sums", module("rank_steps", "--parts", "sums", "--out", str(ranks)), 60),
        Part("hand-off", module("kv_handoff", *hand_off), 60),
        Part("agreement 20b", module("rank_steps", "--parts", "agreement", "--out", str(ranks)), 90),
        Part("engine", module("rank_steps", "--parts", "engine", "--out", str(ranks)), 90),
        Part("steps 20b", module("rank_steps", "--parts", "steps", *quick), 75),
        Part("hand-off, pages directly", module("kv_handoff", *direct), 30),
        Part("hand-off, slots of 64 MiB", module("kv_handoff", *large), 25),
        Part("hand-off, slots of 8 MiB", module("kv_handoff", *small), 25),
        Part("workers", module("worker_pair", "--out", str(out / "worker_pair.json")), 130),
        Part("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests/model/test_parallel_nccl.py"), 60),
        Part("steps 120b", module("rank_steps", "--parts", "steps", "--model", "gpt-oss-120b", *quick), 90),
    )


def main() -> int:
    """Run every part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for raw results")
    parser.add_argument("--seconds", type=float, default=360.0, help="limit of the whole")
    parser.add_argument("--only", default="", help="names of parts, comma-separated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    deadline = time.monotonic() + options.seconds
    wanted = [name for name in options.only.split(",") if name]
    chosen = [part for part in parts(options.out) if not wanted or part.name in wanted]
    begin = time.monotonic()
    good = build_kernels(150)
    print(f"=== kernels {'built' if good else 'NOT built'} in {time.monotonic() - begin:.0f} s", flush=True)
    return 0 if good and all(run_all(chosen, deadline).values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
