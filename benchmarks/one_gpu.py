"""Everything that one H200 is needed for, in one go of less than ten minutes.

Builds the kernels, runs the GPU's tests of what has choices, times the kernels of chunks, then both models:
decode steps, and prompts under every way to multiply their chunks whose tests passed. Each part is a process
of its own with a limit of its own; figures are written as they come. Ends with a table, and with 1 if any
part did.

    python -m antiphon.benchmarks.one_gpu --out results
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from antiphon.benchmarks.model_choices import CHOICES, DEFAULTS
from antiphon.benchmarks.parts import Part, build_kernels, module, run, run_together
from antiphon.benchmarks.records import BENCH_DECODE, Record, load_records

TESTS = {
    "graphs": ("test_chunk_graphs.py", ("default", "projections", "resident", "resident-128")),
    "tiles": ("test_moe_chunks.py", ("resident", "resident-128")),
    "projections": ("test_fp8_projection.py", ("projections",)),
    "kernels": ("test_decode_kernels.py", ()),
    "model": ("test_cuda_transformer.py", ()),
}
"""GPU tests: file, and the ways to compute prompts that are measured only when they pass."""
MODELS = {
    "gpt-oss-20b": ("8192:1,8,32,128;32768:1,32", 0.45),
    "gpt-oss-120b": ("8192:1,8,32,64", 1.0),
}
"""Contexts and batches of decode steps, and the share of the time that is left which a model may take."""
WAYS = ("default", "projections", "launched", "resident", "resident-128")
ANYWHERE = frozenset({"default", "launched"})
"""Ways that a rehearsal on a CPU has too."""


def passed_ways(tested: Mapping[str, bool]) -> list[str]:
    """Without those whose tests failed or did not end."""
    failed = {way for name, (_, ways) in TESTS.items() for way in ways if not tested[name]}
    return [way for way in WAYS if way not in failed]


def test_parts(folder: Path) -> list[Part]:
    """All of the tests, which run at the same time."""
    return [
        Part(f"tests of {name}", ("-m", "pytest", "-q", "-m", "gpu", str(folder / file)), 120)
        for name, (file, _) in TESTS.items()
    ]


def table(records: Iterable[Record]) -> str:
    """A line a figure, a column a way; milliseconds, and the floor."""
    rows: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        if record.bench == BENCH_DECODE:
            what = f"decode, batch {record.batch}, context {record.context}"
        else:
            what = f"prompt of {record.input_tokens}"
        rows.setdefault((record.model, what), {})[str(record.extra.get("choices", "default"))] = record
    lines = []
    for (model, what), found in rows.items():
        floor = next(iter(found.values())).floor
        figures = "; ".join(f"{way} {record.value:.2f}" for way, record in found.items())
        lines.append(f"{model:12s} {what:32s} floor {floor:8.2f} | {figures}")
    return "\n".join(lines)


def measure(options: argparse.Namespace, deadline: float) -> bool:
    """Every part in turn; whether all ended well."""
    out: Path = options.out
    begin = time.monotonic()
    good = True
    if options.device == "cuda":
        good = build_kernels(200)
        took = time.monotonic() - begin
        print(f"=== kernels {'built' if good else 'NOT built'} in {took:.0f} s", flush=True)
    ended = run_together(test_parts(options.tests), deadline, out)
    ways = passed_ways(dict(zip(TESTS, ended.values(), strict=True)))
    if options.device == "cpu":
        ways = [way for way in ways if way in ANYWHERE]
    good = good and all(ended.values())
    if options.device == "cuda":
        kernels = module("kernels_chunk_fp8", "--out", str(out / "kernels.json"))
        good = run(Part("kernels of chunks", kernels, 45), deadline) and good
        tiles = ("--parts", "gpt-oss-20b,gpt-oss-120b", "--tokens", "2048,8192", "--tiles", "160,256,288")
        widened = module("kernels_prefill", *tiles, "--out", str(out / "kernels.json"))
        good = run(Part("widened experts", widened, 40), deadline) and good
    for name in options.models.split(","):
        decode, share = MODELS.get(name, ("128:1,2", 1.0))
        limit_s = (deadline - time.monotonic()) * share
        arguments = ("--model", name, "--device", options.device, "--ways", ",".join(ways))
        points = ("--decode", decode, "--prompts", options.prompts, "--steps", str(options.steps))
        limits = ("--seconds", f"{limit_s - 5:.0f}", "--out", str(out))
        good = (
            run(Part(name, module("model_choices", *arguments, *points, *limits), limit_s), deadline) and good
        )
    if options.device == "cuda":
        split = module(
            "prefill_chunks", "--models", "gpt-oss-20b", "--prompts", "1024,8192", "--repeats", "3"
        )
        split += ("--out", str(out / "prefill_chunks.json"))
        good = run(Part("host and device", split, 90), deadline) and good
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for raw results and logs")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of the whole")
    parser.add_argument("--models", default="gpt-oss-20b,gpt-oss-120b")
    parser.add_argument("--prompts", default="1024,8192,32768")
    parser.add_argument("--steps", type=int, default=128, help="decode steps of a point")
    parser.add_argument(
        "--device", default="cuda", help="cpu: a rehearsal with a small model; nothing is built"
    )
    parser.add_argument("--tests", type=Path, default=Path("tests/gpu"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    good = measure(options, time.monotonic() + options.seconds)
    print(table([*load_records(options.out / DEFAULTS), *load_records(options.out / CHOICES)]), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
