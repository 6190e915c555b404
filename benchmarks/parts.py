"""Measurements in parts: each a process of its own with a limit of its own, within the limit of the whole.

One that hangs or breaks leaves the others their time; what a part wrote before that is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BENCHMARKS = "antiphon.benchmarks"
LEAST_S = 5.0
"""A part that has less left is not begun."""
GRACE_S = 15.0
"""For a part that ran out of time to stop what it started."""


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
    """Compile every CUDA library that is not there, all at a time; parts find them built."""
    from antiphon.cluster.cli_kernels import LIBRARIES

    missing = [index for index, library in enumerate(LIBRARIES) if library.find() is None]
    code = (
        "import sys; from antiphon.cluster.cli_kernels import LIBRARIES; LIBRARIES[int(sys.argv[1])].build()"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(index)]) for index in missing]
    deadline = time.monotonic() + limit_s
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return all(process.returncode == 0 for process in running)


class Log:
    """What is said, here and in a file at once."""

    def __init__(self, file: Path) -> None:
        self._file: IO[str] = file.open("a", buffering=1)
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """One line."""
        with self._lock:
            print(line, flush=True)
            self._file.write(line + "\n")

    def copy(self, source: IO[str]) -> None:
        """Every line of a process, until it and its children have closed their end."""
        with source:
            for line in source:
                self.say(line.rstrip("\n"))

    def close(self) -> None:
        """Nothing is said any more."""
        with self._lock:
            self._file.close()


def run(part: Part, deadline: float, log: Log | None = None) -> bool:
    """Whether a part ended well within its limit and what is left of the whole.

    Args:
        log: keeps what the part says, besides showing it.
    """
    say = _show if log is None else log.say
    limit_s = min(part.limit_s, deadline - time.monotonic())
    if limit_s <= LEAST_S:
        say(f"=== {part.name}: no time is left")
        return False
    say(f"=== {part.name}, at most {limit_s:.0f} s")
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        start_new_session=True,
        text=True,
        stdout=None if log is None else subprocess.PIPE,
        stderr=None if log is None else subprocess.STDOUT,
    )
    copying: threading.Thread | None = None
    if log is not None and process.stdout is not None:
        copying = threading.Thread(target=log.copy, args=(process.stdout,), daemon=True)
        copying.start()
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_session(process)
    if copying is not None:
        copying.join(2.0)
    said = "ran out of time" if code is None else f"ended with {code}"
    say(f"=== {part.name} {said} after {time.monotonic() - begin:.1f} s")
    return code == 0


def run_all(chosen: Sequence[Part], deadline: float, log: Log | None = None) -> dict[str, bool]:
    """Every part in turn; whether each ended well, by name. Says a line about it at the end."""
    ended = {part.name: run(part, deadline, log) for part in chosen}
    line = "=== " + ", ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in ended.items())
    (_show if log is None else log.say)(line)
    return ended


def _show(line: str) -> None:
    print(line, flush=True)


def _end_session(process: subprocess.Popen[str]) -> None:
    """Let a part whose time is over stop what it started in other sessions (a deployment); kill the rest.

    What it left running would take GPUs and memory from the next.
    """
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:  # an interrupt of this process too
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for name, good in ended.items():
        lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()
        said = lines[-1] if lines else "nothing was said"
        print(f"=== {name} {'ok' if good else 'FAILED'}: {said}", flush=True)
    print(f"=== together {time.monotonic() - begin:.1f} s", flush=True)
    return ended
