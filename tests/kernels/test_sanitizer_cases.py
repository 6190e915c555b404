"""What the sanitizer shall watch: every kernel there is, with arguments that it takes; and how it is read."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from antiphon.kernels.cuda_library import KernelLibraryError

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "gpu" / "sanitizer" / "run_sanitizer.py"


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_sanitizer", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DRIVER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def triton_kernels() -> set[str]:
    """Names of the functions that are launched over a grid."""
    names = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if is_launch and isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("_"):
                names.add(node.func.value.id)
    return names


def cuda_launchers() -> set[str]:
    """Names of the functions of the libraries that launch something: those that take a stream."""
    names = set()
    for path in (ROOT / "kernels").rglob("*.cu"):
        names |= set(re.findall(r"int (antiphon_\w+)\([^)]*void\* stream", path.read_text()))
    return names


def test_every_kernel_is_launched_with_arguments_that_it_takes() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "case failed" not in done.stdout
    launched = set(done.stdout.splitlines()[-1].removeprefix("launched: ").split())
    assert len(triton_kernels()) > 10
    assert len(cuda_launchers()) > 15
    assert launched == triton_kernels() | cuda_launchers()


def test_a_case_or_tool_that_does_not_exist_is_refused() -> None:
    for arguments in (["--cases", "no_such_case"], ["--tools", "valgrind"]):
        done = run("--dry-run", *arguments)
        assert done.returncode == 2
        assert f"no such case or tool: {arguments[1]}" in done.stderr


def test_a_machine_without_the_tool_is_told_so(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.shutil, "which", lambda *_, **__: None)
    assert driver.check_under("memcheck", ["logits"]) == driver.UNUSABLE


CLEAN = ["========= COMPUTE-SANITIZER", "case begins: a", "case ended: a 0.5"]
DAMAGE = [
    "case begins: a",
    "========= Invalid __global__ write of size 4 bytes",
    "=========     at _route+0x70",
    "========= ",
    "========= Warning: Race reported between Write access at x",
    "case failed: cuda error",
    "case ended: a 1.25",
    "========= ERROR SUMMARY: 1 error",
]


def test_findings_are_read_from_what_the_tool_says(driver: ModuleType) -> None:
    clean, damaged = driver.read_verdict(CLEAN, "a"), driver.read_verdict(DAMAGE, "a")
    assert (clean.word, clean.seconds, clean.errors) == ("ok", 0.5, [])
    assert damaged.errors == ["Invalid __global__ write of size 4 bytes", "cuda error"]
    assert damaged.warnings == ["Warning: Race reported between Write access at x"]
    assert damaged.line("memcheck").split()[:3] == ["memcheck", "a", "FAILED"]
    assert driver.read_verdict(CLEAN[:2], "a").word == "NOT RUN"


@pytest.mark.parametrize(
    ("lines", "tool_status", "expected"),
    [
        (CLEAN, 0, 0),
        (CLEAN, 1, 1),
        (DAMAGE, 0, 1),
        (CLEAN[:2], 0, 1),
        (["========= Error: Device not supported. Please refer to"], 1, 2),
    ],
    ids=["clean", "the process failed", "found", "cut off", "unusable"],
)
def test_the_exit_status_says_which(
    lines: list[str], tool_status: int, expected: int, driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.shutil, "which", lambda *_, **__: "/bin/compute-sanitizer")
    monkeypatch.setattr(driver, "_run", lambda _: (tool_status, lines))
    assert driver.check_under("memcheck", ["a"]) == expected


def test_each_case_runs_in_a_process_of_its_own(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tool that has reported its fill calls everything clean."""
    monkeypatch.setattr(driver.shutil, "which", lambda *_, **__: "/bin/compute-sanitizer")
    begun = []

    def run(command: list[str]) -> tuple[int, list[str]]:
        begun.append(command[-1])
        race = ["========= Error: Race reported between x"] if command[-1] == "b" else []
        return 0, [f"case begins: {command[-1]}", *race, f"case ended: {command[-1]} 0.1"]

    monkeypatch.setattr(driver, "_run", run)
    for jobs in (1, 3):
        begun.clear()
        assert driver.check_under("memcheck", ["a", "b", "c", "moe_streamed_4"], jobs) == driver.FOUND
        assert sorted(begun) == ["a", "b", "c", "moe_streamed_4"]
        assert begun[0] == "moe_streamed_4" or jobs > 1
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        words = {line[1]: line[2] for line in printed if line[0] == "memcheck"}
        assert words == {"a": "ok", "b": "FAILED", "c": "ok", "moe_streamed_4": "ok"}


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (["copies_out_of_order"], 0),
        ([], 2),
        (["copies_in_order", "copies_out_of_order"], 2),
        (["copies_out_of_order", "an old one"], 2),
    ],
    ids=["as it should be", "blind", "cries wolf", "old"],
)
def test_a_racecheck_that_does_not_know_a_race_is_not_believed(
    reported: list[str], expected: int, driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.shutil, "which", lambda *_, **__: "/bin/compute-sanitizer")
    monkeypatch.syspath_prepend(DRIVER.parent)
    builds = importlib.import_module("racecheck_builds")
    monkeypatch.setattr(builds, "build", lambda: "")

    def run(command: list[str]) -> tuple[int, list[str]]:
        if command[1:] == ["--version"]:
            version = "2025.3.1.0" if "an old one" in reported else "2026.4.0.0"
            return 0, ["NVIDIA (R) Compute Sanitizer\n", f"Version {version} (build 1)\n"]
        name = command[-1]
        race = ["========= Error: Race reported between x"] if name in reported else []
        return 0, [f"case begins: {name}", *race, f"case ended: {name} 0.1"]

    monkeypatch.setattr(driver, "_run", run)
    assert driver.check_under("racecheck", ["a"]) == expected


def test_racecheck_watches_libraries_in_which_every_lane_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DRIVER.parent)
    builds = importlib.import_module("racecheck_builds")
    monkeypatch.setenv("ANTIPHON_KERNEL_LIBRARY_DIR", str(tmp_path))
    sources = (ROOT / "kernels").rglob("*.cu*")
    arriving = {path.name for path in sources if "warp_arrive(" in path.read_text()}
    watched = {path.name for library in builds.WATCHED for path in (*library.sources, *library.headers)}
    assert arriving <= watched
    for library in builds.WATCHED:
        form = library.for_racecheck()
        assert form.file_name != library.file_name
        assert form.file_name.startswith(f"{library.name}_for_racecheck-")
        with builds.loaded(), pytest.raises(KernelLibraryError, match=form.file_name):
            library.load()


def test_a_case_that_hangs_ends_with_the_time_limit(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit_s in (1, 5, 25):  # on a crowded machine even a shell may take long to say its first word
        monkeypatch.setattr(driver, "TIMEOUT_S", limit_s)
        status, lines = driver._run(["sh", "-c", "echo before; sleep 60; echo after"])
        assert status == -9
        if lines:
            break
    assert lines == ["before\n"]
