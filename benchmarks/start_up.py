"""What an H200 is needed for to say how workers start and that kernels touch no other memory, in one go.

Builds the kernels, runs the tests of converted weights, of kernels built ahead and of what decode steps read,
times loads of gpt-oss-20b with and without FP8 experts and of gpt-oss-120b, and runs every kernel under
compute-sanitizer. Each part is a process with a limit of its own; ends with 1 if any part did, and by ten
minutes in any case.

    python -m antiphon.benchmarks.start_up --out results [--scratch /dev/shm]

``--scratch`` takes 13.8 GB and up to 30 GB of converted weights, then 65 GB: main memory where there is
enough, which is as good as the page cache that a worker would find; a cold load is none then. What a killed
run left there is removed first.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from antiphon.benchmarks.parts import Part, build_kernels, module, run, run_all

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = "antiphon-start-up"
MARK = ".made-by-start-up"
SANITIZER = ROOT / "tests" / "gpu" / "sanitizer" / "run_sanitizer.py"
TESTS = tuple(
    ROOT / "tests" / "gpu" / f"test_{name}.py"
    for name in ("weight_cache_cuda", "built_ahead", "decode_attention", "router_cuda")
)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """An empty folder of this program's own, gone afterwards; one that a killed run left over is taken over.

    It is known by a file inside, which a run keeps locked: the lock ends with the process, however that ends.

    Raises:
        SystemExit: another run is using it, or what has its name was not made here.
    """
    folder = parent / SCRATCH
    mark = folder / MARK
    left_over = False
    try:
        folder.mkdir()
    except FileExistsError:
        made_here = not folder.is_symlink() and folder.is_dir()
        left_over = made_here and (mark.is_file() or not any(folder.iterdir()))
        if not left_over:
            raise SystemExit(f"{folder} is there and was not made by this program: remove it first") from None
    with mark.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{folder} is being used by another run") from None
        if left_over:
            print(f"=== {folder} was left over: what is in it is removed", flush=True)
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != mark:
                    path.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def load_part(name: str, scratch: Path, out: Path, *options: str, limit_s: float) -> Part:
    """A load of a model that is made in the scratch folder, where it stays."""
    arguments = (str(scratch / name), "--like", name, "--out", str(out / "load.json"), *options)
    return Part(f"load of {' '.join((name, *options))}", module("load", *arguments), limit_s)


def parts(scratch: Path, out: Path) -> list[Part]:
    """All but the build and the largest model, in the order in which they are run."""
    cache = ("--cache", str(scratch / "converted"))
    return [
        Part("tests", ("-m", "pytest", "-q", "-m", "gpu", *map(str, TESTS)), 200),
        load_part("gpt-oss-20b", scratch, out, "--repeats", "2", limit_s=120),
        load_part("gpt-oss-20b", scratch, out, "--repeats", "2", "--resident-fp8", *cache, limit_s=120),
        Part("sanitizer", (str(SANITIZER),), 300),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 when all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for raw results")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="folder for checkpoints")
    parser.add_argument("--seconds", type=float, default=560.0, help="limit of the whole")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    good = build_kernels(200)
    print(f"=== kernels {'built' if good else 'NOT built'}", flush=True)
    with scratch_folder(options.scratch) as scratch:
        good = all(run_all(parts(scratch, options.out), deadline).values()) and good
        for folder in ("gpt-oss-20b", "converted"):  # room for the next one
            shutil.rmtree(scratch / folder, ignore_errors=True)
        kinds = ("--kinds", "converted", "--repeats", "2")
        good = run(load_part("gpt-oss-120b", scratch, options.out, *kinds, limit_s=200), deadline) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
