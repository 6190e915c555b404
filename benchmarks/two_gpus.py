"""Everything that two GPUs of one host are needed for, in one go of less than ten minutes.

Each part is a process of its own with a limit of its own, so that one that hangs or breaks leaves the others
their time; parts write their results as they come, so what was measured before that is kept, and what they
say is kept in ``log.txt``. Ends with 1 if any part did. Not all parts have time in one go; a second takes
those that are left, by their names.

    python -m antiphon.benchmarks.two_gpus --out results
    python -m antiphon.benchmarks.two_gpus --out results --only "engine 20b TP2|engine 120b TP2"

``--device cpu`` runs the same road with small shapes on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from antiphon.benchmarks.parts import Log, Part, build_kernels, module, run_all

CHUNK_TEST = "tests/gpu/test_rank_chunks_cuda.py"
TESTS = (
    "tests/gpu/test_peer_memory_cuda.py",
    "tests/model/test_parallel_nccl.py",
    "tests/gpu/test_rank_end_cuda.py",
    "tests/gpu/test_run_copy.py",
    "tests/gpu/test_mapped_handoff.py",
)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def gpu_parts(out: Path, models: Path) -> tuple[Part, ...]:
    """In the order of what is most needed.

    Args:
        models: where checkpoints of the published shapes are put, by the parts that make them.
    """
    records = ("--out", out / "records.json")
    hand_off = ("--compute-ms", "8192:80,32768:400,131072:2400", "--out", out / "transfer.json")
    streams = ("--tokens", "1024,8192,32768", "--seconds", "8", "--repeats", "3", *records)
    pair = ("--config", CONFIGS / "two-gpus-20b.yaml", *records)

    def way(name: str, *arguments: str) -> tuple[str, ...]:
        file = out / f"transfer_{name}.json"
        return module("kv_handoff", "--tokens", "8192", "--repeats", "3", *arguments, "--out", file)

    def engine(size: str, layout: str, limit_s: float) -> Part:
        arguments = ("--model", f"gpt-oss-{size}", "--layout", layout, "--seconds", f"{limit_s - 10:g}")
        return Part(f"engine {size} {layout}", module("rank_engine", *arguments, *records), limit_s)

    def synthesize(size: str, limit_s: float) -> Part:
        what = ("checkpoint", "synthesize", models / f"gpt-oss-{size}", "--like", f"gpt-oss-{size}")
        arguments = ("-m", "antiphon.cluster.cli", *map(str, what), "--device", "cuda")
        return Part(f"synthesize {size}", arguments, limit_s)

    def served(size: str, limit_s: float) -> Part:
        config = ("--config", CONFIGS / f"two-gpus-{size}.yaml", "--model", models / f"gpt-oss-{size}")
        return Part(f"served {size}", module("served_pair", *config, "--split-only", *records), limit_s)

    return (
        Part("sums", module("rank_steps", "--parts", "sums", *records), 60),
        Part("hand-off", module("kv_handoff", *hand_off), 70),
        Part(
            "agreement", module("rank_steps", "--parts", "agreement", "--model", "gpt-oss-tiny", *records), 60
        ),
        engine("20b", "TP2 EP2", 100),
        engine("120b", "TP2 EP2", 130),
        Part("chunks over ranks", ("-m", "pytest", "-q", "-m", "gpu", CHUNK_TEST), 170),
        Part("workers", module("worker_pair", *streams), 110),
        Part("served demo", module("served_pair", "--model", "gpt-oss-tiny", *pair), 150),
        Part("texts", module("rank_steps", "--parts", "texts", *records), 60),
        Part("agreement 20b", module("rank_steps", "--parts", "agreement", *records), 60),
        Part("hand-off, blocks", way("blocks", "--blocks", "8,16,32,64"), 60),
        Part("hand-off, staged", way("staged", "--way", "staged"), 25),
        Part("hand-off, pages by NIXL", way("pages", "--way", "pages"), 30),
        synthesize("20b", 60),
        served("20b", 120),
        engine("20b", "TP2", 130),
        engine("120b", "TP2", 160),
        synthesize("120b", 120),
        served("120b", 160),
        Part("tests", ("-m", "pytest", "-q", "-m", "gpu", *TESTS), 180),
    )


def cpu_parts(out: Path) -> tuple[Part, ...]:
    """The same programs with gloo, shared memory and small shapes; figures of no interest."""
    records, cpu = ("--out", out / "records.json"), ("--device", "cpu")
    demo = ("--model", "gpt-oss-tiny")
    small = ("--model", "tiny", *cpu, "--tokens", "256,512", "--repeats", "2")
    pair = ("--config", CONFIGS / "local-cpu.yaml", *records)
    prompts = ("--prompts", "130", "--batches", "1,2", "--context", "140", "--steps", "3", "--repeats", "1")
    streams = ("--streams", "2", "--context", "256", "--seconds", "2", *records)
    return (
        Part("sums", module("rank_steps", *cpu, "--parts", "sums", *records), 60),
        Part("hand-off", module("kv_handoff", *small, "--out", out / "transfer.json"), 60),
        Part("agreement", module("rank_steps", *cpu, "--parts", "agreement", *demo, *records), 200),
        Part("workers", module("worker_pair", *small, *streams), 120),
        Part("texts", module("rank_steps", *cpu, "--parts", "texts", *demo, *records), 120),
        Part(
            "engine",
            module("rank_engine", "--model", "tiny", *cpu, *prompts, "--chunk", "128", *records),
            120,
        ),
        Part("served demo", module("served_pair", *demo, *pair), 300),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for raw results")
    parser.add_argument("--seconds", type=float, default=545.0, help="limit of the whole")
    parser.add_argument("--only", default="", help="names of parts, with | between them")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", type=Path, default="/dev/shm", help="where checkpoints are put")
    parser.add_argument("--list", action="store_true", help="say what would run, and how long it may take")
    options = parser.parse_args(arguments)
    parts = gpu_parts(options.out, options.models) if options.device == "cuda" else cpu_parts(options.out)
    wanted = [name for name in options.only.split("|") if name]
    unknown = set(wanted) - {part.name for part in parts}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {[part.name for part in parts]}")
    chosen = [part for part in parts if not wanted or part.name in wanted]
    if options.list:
        for part in chosen:
            print(f"{part.limit_s:4.0f} s  {part.name}: {' '.join(part.arguments)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ["PYTHONUNBUFFERED"] = "1"
    deadline = time.monotonic() + options.seconds
    log = Log(options.out / "log.txt")  # open as long as this process: a part's child may still speak
    good = True
    if options.device == "cuda":
        begin = time.monotonic()
        good = build_kernels(150)
        log.say(f"=== kernels {'built' if good else 'NOT built'} in {time.monotonic() - begin:.0f} s")
    ended = run_all(chosen, deadline, log)
    return 0 if good and all(ended.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
