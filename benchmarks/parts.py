"""Measurements in parts: each a process of its own with a limit of its own, within the limit of the whole.

One that hangs or breaks leaves the others their time; what a part wrote before that is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = "antiphon.benchmarks"


@dataclass(frozen=True, slots=True)
class Part:
    """One command: arguments of this Python, and how long it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


def module(name: str, *arguments: str | Path) -> tuple[str, ...]:
    """Arguments of a Python that runs one of the benchmarks."""
    return ("-m", f"{BENCHMARKS}.{name}", *map(str, arguments))


def build_kernels(limit_s: float) -> bool:
    """Compile every CUDA library once, all at a time; parts find them built."""
    from antiphon.cluster.cli_kernels import LIBRARIES

    code = (
        "import sys; from antiphon.cluster.cli_kernels import LIBRARIES; LIBRARIES[int(sys.argv[1])].build()"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(index)]) for index in range(len(LIBRARIES))]
    deadline = time.monotonic() + limit_s
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return all(process.returncode == 0 for process in running)


def run(part: Part, deadline: float) -> bool:
    """Whether a part ended well within its limit and what is left of the whole."""
    limit_s = min(part.limit_s, deadline - time.monotonic())
    if limit_s <= 5:
        print(f"=== {part.name}: no time is left", flush=True)
        return False
    print(f"=== {part.name}, at most {limit_s:.0f} s", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, *part.arguments], start_new_session=True)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    said = "ran out of time" if code is None else f"ended with {code}"
    print(f"=== {part.name} {said} after {time.monotonic() - begin:.1f} s", flush=True)
    return code == 0


def run_all(chosen: Sequence[Part], deadline: float) -> dict[str, bool]:
    """Every part in turn; whether each ended well, by name. Prints a line that says so at the end."""
    ended = {part.name: run(part, deadline) for part in chosen}
    print("=== " + ", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in ended.items()), flush=True)
    return ended


def run_together(chosen: Sequence[Part], deadline: float, logs: Path) -> dict[str, bool]:
    """Every part at the same time, for what is not timed; whether each ended well, by name.

    Args:
        logs: folder for what each says; the last line is printed.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    begin = time.monotonic()
    ended: dict[str, bool] = {}
    try:
        for part in chosen:
            with (logs / f"{part.name}.log").open("wb") as log:
                command = [sys.executable, *part.arguments]
                running[part.name] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        for part in chosen:
            limit_s = max(0.0, min(begin + part.limit_s, deadline) - time.monotonic())
            try:
                ended[part.name] = running[part.name].wait(limit_s) == 0
            except subprocess.TimeoutExpired:
                ended[part.name] = False
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    for name, good in ended.items():
        lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()
        said = lines[-1] if lines else "nothing was said"
        print(f"=== {name} {'ok' if good else 'FAILED'}: {said}", flush=True)
    print(f"=== together {time.monotonic() - begin:.1f} s", flush=True)
    return ended
