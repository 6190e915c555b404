"""Every kernel under compute-sanitizer's memcheck and racecheck: one line a case and tool, exit status.

Run: ``make sanitize-gpu``, or this file (``--tools``, ``--cases`` with commas between several, ``--jobs``),
where the libraries were built. Each case has a process of its own, because a tool that has reported its fill
calls everything clean. ``--dry-run`` needs no GPU: Triton kernels run in its interpreter, and of CUDA
kernels the arguments are checked against what their launchers take.

Racecheck watches libraries of its own, and is itself checked first (``racecheck_builds.py``); nvcc makes them
where they were not brought along.

Exit status: 0 clean; 1 a tool found something, or a case failed; 2 the tool cannot be used here.

The sanitizer runs one launch after the other. So a launch that programmatic dependent launch would begin
early begins when the one ahead is over, and what overlap alone could break is not seen here; tests that
compare bits from run to run are for that. Blocks of the experts' launch wait for one another within their
launch: they all have to be on the device at one time, which they are, one per multiprocessor; here only
BLOCKS of them are launched, because instrumented waiting is slow. If they were not, the case would end by the
time limit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

TOOLS = {
    "memcheck": ("--check-device-heap", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    "initcheck": (),
}
DEFAULT_TOOLS = "memcheck,racecheck"
TIMEOUT_S = 600
BLOCKS = 8
"""What is said to be the number of multiprocessors, by which persistent kernels choose their grids."""
CLEAN, FOUND, UNUSABLE = 0, 1, 2
_BEGIN, _END, _FAILED = "case begins:", "case ended:", "case failed:"
_HEADING = re.compile(r"^========= (?! )(?!COMPUTE-SANITIZER)(?!ERROR SUMMARY)(?!RACECHECK SUMMARY)(.+)")
OLDEST = (2026, 4)
"""Version of the tool whose racecheck is known to understand named barriers; 2025.3 does not."""
_LONG = "moe_streamed"
_UNUSABLE = ("Device not supported", "Unable to find injection library", "No attachable process")


@dataclass(slots=True)
class Verdict:
    """What a tool said of one case."""

    name: str
    seconds: float = 0.0
    ended: bool = False
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """How it went, in one word."""
        if self.errors:
            return "FAILED"
        return "ok" if self.ended else "NOT RUN"

    def line(self, tool: str) -> str:
        """One line for people."""
        text = f"{tool:10} {self.name:26} {self.word:8} {self.seconds:6.1f} s"
        if self.warnings:
            text += f"  {len(self.warnings)} warnings: {self.warnings[0]}"
        return f"{text}  {self.errors[0]}" if self.errors else text


def read_verdict(lines: Sequence[str], name: str) -> Verdict:
    """Of the one case that was to run, from the merged output of it and the tool."""
    verdict = Verdict(name)
    begun = False
    for line in lines:
        marker, _, rest = line.partition(": ")
        if f"{marker}:" == _BEGIN:
            begun = True
        elif begun and f"{marker}:" == _END:
            verdict.ended, verdict.seconds = True, float(rest.split()[1])
        elif begun and f"{marker}:" == _FAILED:
            verdict.errors.append(rest.strip())
        elif begun and (found := _HEADING.match(line)):
            heading = found.group(1).strip()
            (verdict.warnings if heading.startswith("Warning") else verdict.errors).append(heading)
    return verdict


def check_under(tool: str, names: Sequence[str], jobs: int = 1) -> int:
    """Run the cases under one tool, so many at a time, and print a line each; returns the exit status."""
    executable = _executable()
    if executable is None:
        print("there is no compute-sanitizer: requirements/sanitizer.txt names its package", file=sys.stderr)
        return UNUSABLE
    if tool == "racecheck" and (complaint := _complaint_of_racecheck(executable)):
        print(complaint, file=sys.stderr)
        return UNUSABLE
    begin, good = time.perf_counter(), True
    with ThreadPoolExecutor(jobs) as pool:
        longest_first = sorted(names, key=lambda name: not name.startswith(_LONG))
        running = {pool.submit(_run, _command(executable, tool, name)): name for name in longest_first}
        for done in as_completed(running):
            status, lines = done.result()
            if _is_unusable(lines):
                pool.shutdown(wait=False, cancel_futures=True)
                print("".join(lines[-20:]), file=sys.stderr)
                return UNUSABLE
            verdict = read_verdict(lines, running[done])
            print(verdict.line(tool), flush=True)
            if verdict.word != "ok" or status != 0:
                good = False
                print(f"exit status {status}\n", *lines, sep="", flush=True)
    print(
        f"{tool}: {len(names)} cases in {time.perf_counter() - begin:.0f} s, {'clean' if good else 'FAILED'}"
    )
    return CLEAN if good else FOUND


def _executable() -> str | None:
    """The packaged one, before those of a CUDA toolkit."""
    package = find_spec("nvidia")
    folders = (
        [] if package is None else [f"{place}/cu13/bin" for place in package.submodule_search_locations or ()]
    )
    toolkit = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([*folders, os.environ["PATH"], *toolkit]))


def _command(executable: str, tool: str, name: str) -> list[str]:
    return [
        *(executable, "--tool", tool, *TOOLS[tool], "--target-processes", "application-only"),
        *("--destroy-on-device-error", "kernel", "--print-limit", "20"),
        *(sys.executable, __file__, "--inside", "--tools", tool, "--cases", name),
    ]


def _is_unusable(lines: Sequence[str]) -> bool:
    return any(text in line for line in lines for text in _UNUSABLE)


def _complaint_of_racecheck(executable: str) -> str:
    """Why what this racecheck says is worth nothing; nothing when it is."""
    from racecheck_builds import CANARIES, build

    _, said = _run([executable, "--version"])
    version = re.search(r"^Version (\d+)\.(\d+)", "".join(said), re.MULTILINE)
    if version is None or tuple(map(int, version.groups())) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return f"racecheck: {executable} is not {wanted} or newer: {''.join(said[-1:]).strip()}"
    if missing := build():
        return missing
    for name, expected in zip(CANARIES, ("ok", "FAILED"), strict=True):
        _, lines = _run(_command(executable, "racecheck", name))
        verdict = read_verdict(lines, name)
        if _is_unusable(lines) or verdict.word != expected:
            return f"racecheck: {name}: {verdict.word}, where {expected} is true\n{''.join(lines[-20:])}"
    return ""


def _run(command: list[str]) -> tuple[int, list[str]]:
    """A command's exit status and lines, standard error among them; it is killed at the time limit."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        timer = threading.Timer(TIMEOUT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        try:
            lines = list(process.stdout or ())
            return process.wait(), lines
        finally:
            timer.cancel()


def run_cases(
    cases: Mapping[str, Callable[[Any], object]],
    names: Sequence[str],
    machine: Any,
    synchronize: Callable[[], None],
) -> bool:
    """Run some of the cases in this process between markers; whether all went well."""
    good = True
    for name in names:
        print(_BEGIN, name, flush=True)
        begin = time.perf_counter()
        try:
            cases[name](machine)
            synchronize()
        except Exception as error:
            print(_FAILED, " ".join(str(error).split())[:200] or type(error).__name__, flush=True)
            good = False
        print(_END, name, round(time.perf_counter() - begin, 2), flush=True)
    return good


@contextmanager
def small_device() -> Iterator[None]:
    """Within, every device is an H200 with BLOCKS multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=BLOCKS, major=9, minor=0)
    with mock.patch("torch.cuda.get_device_properties", return_value=properties):
        yield


def run_inside(tool: str, names: Sequence[str]) -> int:
    """What the sanitizer watches."""
    import racecheck_builds
    import torch
    from sanitizer_fp8_cases import CASES, Machine

    cases = {**CASES, **racecheck_builds.CANARIES}
    torch.manual_seed(0)
    torch.cuda.init()  # which asks for the device's properties itself
    with small_device(), racecheck_builds.loaded() if tool == "racecheck" else nullcontext():
        good = run_cases(cases, names, Machine(torch.device("cuda")), torch.cuda.synchronize)
    return CLEAN if good else FOUND


def dry_run(names: Sequence[str]) -> int:
    """Every case without a GPU; ends with the names of all kernels that were launched."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from sanitizer_fp8_cases import CASES, Machine
    from triton.runtime.interpreter import GridExecutor

    from antiphon.kernels.cuda_library import CudaLibrary

    launched: set[str] = set()
    call = GridExecutor.__call__

    def interpret(self: Any, *arguments: object, **options: object) -> object:
        launched.add(self.fn.__name__)
        return call(self, *arguments, **options)

    torch.manual_seed(0)
    with (
        small_device(),
        mock.patch("torch.cuda.current_stream", return_value=SimpleNamespace(cuda_stream=0)),
        mock.patch.object(CudaLibrary, "load", side_effect=lambda: _Launchers(launched)),
        mock.patch.object(GridExecutor, "__call__", interpret),
    ):
        machine = Machine(torch.device("cpu"), torch.float32, pdl=False)
        good = run_cases(CASES, names, machine, lambda: None)
    print("launched:", *sorted(launched), flush=True)
    return CLEAN if good else FOUND


class _Launchers:
    """Stands for a CUDA library: a launch only checks that its arguments fit."""

    def __init__(self, launched: set[str]) -> None:
        self._launched = launched
        self._functions: dict[str, _Launcher] = {}

    def __getattr__(self, name: str) -> _Launcher:
        return self._functions.setdefault(name, _Launcher(name, self._launched))


class _Launcher:
    def __init__(self, name: str, launched: set[str]) -> None:
        self.argtypes: Sequence[Any] = ()
        self._name, self._launched = name, launched

    def __call__(self, *arguments: object) -> int:
        if len(arguments) != len(self.argtypes):
            raise TypeError(f"{self._name} takes {len(self.argtypes)} arguments, was given {len(arguments)}")
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            kind.from_param(argument)
        self._launched.add(self._name)
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=DEFAULT_TOOLS, help=f"which of {', '.join(TOOLS)}")
    parser.add_argument("--cases", help="names, with commas between them; all when absent")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="cases at a time")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from sanitizer_fp8_cases import CASES

    names = list(CASES) if options.cases is None else options.cases.split(",")
    tools = options.tools.split(",")
    if options.inside:
        return run_inside(tools[0], names)
    unknown = (set(names) - set(CASES)) | (set(tools) - set(TOOLS))
    if unknown:
        parser.error(f"no such case or tool: {', '.join(sorted(unknown))}")
    if options.dry_run:
        return dry_run(names)
    return max(check_under(tool, names, options.jobs) for tool in tools)


if __name__ == "__main__":
    sys.exit(main())
