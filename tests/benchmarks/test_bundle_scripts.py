"""The bundle's scripts: every command that they print is one that its program takes; steps keep limits."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.core

from antiphon.benchmarks.bundle.kinds import KINDS, scripts_of, served_by
from antiphon.benchmarks.bundle.make import ALWAYS, SCRIPTS
from antiphon.benchmarks.bundle.needs import files_of, source_of
from antiphon.benchmarks.two_gpus import gpu_parts

ROOT = Path(__file__).resolve().parents[2]
RUNNING = sorted({script for kind in KINDS for script in scripts_of(kind)})
MOST_S = 590


class Taken(Exception):
    """A program took its arguments."""


@dataclass(frozen=True)
class Step:
    name: str
    limit_s: int
    command: list[str]


def run_script(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def steps_of(script: str, *arguments: str, **variables: str) -> list[Step]:
    """What a script would run."""
    done = run_script(SCRIPTS / script, *arguments, DRY="1", **variables)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return [Step(name, int(limit), shlex.split(command)) for name, limit, command in lines]


def take(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of a command read its arguments, and no more.

    Raises:
        SystemExit: it refuses them.
    """
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: Any, args: Any = None, namespace: Any = None) -> Any:
        parse(self, args, namespace)
        raise Taken

    def invoke_only(self: Any, context: Any) -> None:
        raise Taken

    python, *rest = command
    assert python == sys.executable
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patched.setattr(typer.core.TyperCommand, "invoke", invoke_only)
        patched.setattr(sys, "path", list(sys.path))
        patched.setattr(sys, "argv", rest[1:] if rest[0] == "-m" else rest)
        with pytest.raises(Taken):
            _run(rest)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        importlib.import_module(words[1]).main()
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.mark.parametrize("script", RUNNING)
def test_every_command_is_one_that_its_program_takes(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for step in steps_of(script):
        assert 0 < step.limit_s < MOST_S
        module = step.command[2]
        if step.command[1] == "-c":
            compile(module, script, "exec")
        elif module == "pytest":
            files = [word for word in step.command if word.endswith(".py")]
            assert files
            assert all((ROOT / file).is_file() for file in files)
        elif (module, script) != ("antiphon.benchmarks.two_gpus", "two_gpus.sh") or module not in seen:
            seen.add(module)  # names of parts come from that program itself
            take(step.command, monkeypatch)


def test_every_part_of_two_gpus_is_one_that_its_program_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in gpu_parts(tmp_path, Path("/m")):
        if part.arguments[1].startswith("antiphon."):
            take([sys.executable, *part.arguments], monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_bundle_packs_is_asked_of_every_program_that_it_runs(kind: str, tmp_path: Path) -> None:
    known = set()
    for each in served_by(kind):
        known |= {*files_of(each.entries), *files_of(each.commands, late=False)}
    commands = [step.command for script in scripts_of(kind) for step in steps_of(script)]
    if kind == "served":  # kinds before it say which parts they cannot run
        commands += [[sys.executable, *part.arguments] for part in gpu_parts(tmp_path, Path("/m"))]
    for module in {words[2] for words in commands if words[1] == "-m"} - {"pytest"}:
        assert source_of(module) in known, module


def test_a_command_that_a_program_refuses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        take([sys.executable, "-m", "antiphon.benchmarks.load", "folder", "--no-such"], monkeypatch)
    with pytest.raises(SystemExit):
        take([sys.executable, "-m", "antiphon.cluster.cli", "bench", "sweep", "--no-such"], monkeypatch)


def test_every_test_of_a_gpu_is_run_once() -> None:
    files = [
        word for step in steps_of("one_gpu.sh") for word in step.command if word.startswith("tests/gpu/test_")
    ]
    assert sorted(files) == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")
    )


def test_steps_are_picked_by_name_and_options_are_passed_on() -> None:
    assert [step.name for step in steps_of("one_gpu.sh", ONLY="load-* choices-20b")] == [
        *("kernels", "choices-20b", "load-20b", "load-120b")
    ]
    *_, split = steps_of("split.sh", "--only", "split", MODEL="gpt-oss-120b", LIMIT_S="400")
    assert split.command[-2:] == ["--only", "split"]
    assert "configs/two-gpus-120b.yaml" in split.command
    assert int(split.command[split.command.index("--limit") + 1].removesuffix("s")) < 400
    *_, peer = steps_of("peer.sh", LAYOUTS="TP2", TARGET="/somewhere")
    assert "/somewhere/peer-python" in peer.command
    assert peer.command[peer.command.index("--layouts") + 1] == "TP2"


def test_hosts_of_four_and_of_eight_gpus_take_the_layouts_that_fit() -> None:
    asked = {}
    for gpus in (4, 8):
        commands = {step.name: step.command for step in steps_of("many_gpus.sh", GPUS=str(gpus))}
        sweep, agreement = commands["sweep"], commands["agreement-120b"]
        ranks = agreement[agreement.index("--ranks") + 1]
        asked[gpus] = ranks, sweep[sweep.index("--layouts") + 1]
    assert asked == {4: ("4", "TP4,TP4 EP4"), 8: ("8", "TP4,TP4 EP4,TP8")}


def test_scripts_run_in_the_root_of_a_checkout_alone(tmp_path: Path) -> None:
    for script in {*RUNNING, "setup.sh"}:
        done = subprocess.run(
            ["bash", str(SCRIPTS / script)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "run this in the root of the project's checkout" in done.stderr
    assert {path.name for path in SCRIPTS.iterdir()} == {*RUNNING, *ALWAYS}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that is set up at once and whose kernels are built."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    steps = (SCRIPTS / "steps.sh").read_text()
    head, step, _ = steps.rpartition("ONLY='*' step kernels")
    assert step
    (folder / "steps.sh").write_text(head + "ONLY='*' step kernels 9 true\n")
    (folder / "setup.sh").write_text(
        '[ "$*" = --whole ] && mkdir -p "$TARGET" && echo "export PYTHONPATH=$PWD/src" >"$TARGET/env.sh"\n'
    )
    return folder


def run_steps(bundle: Path, lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of its own over the common steps, its results in ``out``."""
    script = bundle / "own.sh"
    script.write_text(f'source "$(dirname "$0")/steps.sh"\n{lines}\n')
    folders = {"OUT": str(bundle / "out"), "TARGET": str(bundle / "target"), "TMPDIR": str(bundle)}
    return run_script(script, **folders | variables)


def test_a_step_that_fails_or_hangs_leaves_the_others_their_time(bundle: Path) -> None:
    lines = """
    step bad 60 bash -c 'echo what went wrong; exit 3'
    step hangs 1 sleep 60
    step beside 60 bash -c 'sleep 0.2; echo one' &
    step too 60 bash -c 'sleep 0.2; echo two' &
    wait
    SHOW=1 step good 60 bash -c 'echo much; echo "the table"'
    """
    done = run_steps(bundle, lines)
    assert done.returncode == 1
    verdicts = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line.endswith(" s")}
    assert verdicts == {
        "kernels": "ok",
        "bad": "FAILED",
        "hangs": "FAILED",
        "beside": "ok",
        "too": "ok",
        "good": "ok",
    }
    assert "--- the end of what bad said\nwhat went wrong\n" in done.stdout
    assert "\nthe table\n" in done.stdout
    assert "much" not in done.stdout
    log = (bundle / "out/log.txt").read_text()
    assert "=== too ok" in log
    assert "much\nthe table\n" in log
    assert [path.name for path in (bundle / "out").iterdir()] == ["log.txt"]
    assert not list(bundle.glob("tmp.*")), "the folder of logs is gone"


def test_a_log_of_any_length_is_kept_by_its_beginning_and_its_end(bundle: Path) -> None:
    """Of each step, and of all steps of all runs together."""
    long = "bash -c 'echo the first line; seq -f %0500.0f 2000; echo the last line'"
    assert run_steps(bundle, f"step long 60 {long}").returncode == 0
    log = bundle / "out/log.txt"
    assert 290_000 < log.stat().st_size < 310_000
    for line in ("the first line", "the middle is left out", "the last line"):
        assert line in log.read_text(), line
    for run in range(3):
        lines = f"step s{run} 60 bash -c 'echo begin {run}; seq 20000; echo end {run}'"
        assert run_steps(bundle, lines, LOG_BYTES="400000").returncode == 0
        assert log.stat().st_size <= 400_000
    said = log.read_text()
    assert said.index("the first line") < said.index("the middle is left out") < said.index("end 2")
    assert "begin 2" in said, "a whole step is in the half that is the end"
    assert [path.name for path in (bundle / "out").iterdir()] == ["log.txt"]


def test_what_a_step_keeps_in_the_log_itself_is_bounded_too(bundle: Path) -> None:
    line = 'KEEPS_LOG=1 step own 60 bash -c \'seq 100000 >>"$OUT/log.txt"; echo the end >>"$OUT/log.txt"\''
    assert run_steps(bundle, f"export OUT\n{line}", LOG_BYTES="50000").returncode == 0
    said = (bundle / "out/log.txt").read_text()
    assert len(said) <= 50_000
    assert said.startswith("=== kernels ok")
    assert said.endswith("the end\n")


def test_all_went_well_is_zero_and_a_deployment_hears_an_interrupt_first(bundle: Path) -> None:
    assert run_steps(bundle, "step good 60 true").returncode == 0
    stops = "trap 'echo stopped what it started; exit 1' INT; while :; do sleep 0.05; done"
    for limit_s in (1, 4, 16):  # on a crowded machine even a shell may take long to set its trap
        done = run_steps(bundle, f"step serves {limit_s} bash -c {shlex.quote(stops)}")
        if "stopped what it started" in done.stdout:
            return
    pytest.fail(done.stdout)


def test_what_has_no_time_is_named_for_the_next_run(bundle: Path) -> None:
    done = run_steps(
        bundle, "step first 60 true\nstep slow 30 sleep 3\nstep late 9 true\nstep last 9 true", LIMIT_S="37"
    )
    assert done.returncode == 1
    (left,) = [
        line for line in done.stdout.splitlines() if line.startswith("no time was left: go on with ONLY=")
    ]
    assert {"last", "late"} <= set(left.partition("=")[2].strip('"').split())
    assert "late " not in "".join(line for line in done.stdout.splitlines(True) if line.endswith(" s\n"))


def test_a_name_of_no_step_is_an_error(bundle: Path) -> None:
    done = run_steps(bundle, "step first 60 true", ONLY="frist")
    assert done.returncode == 1
    assert 'ONLY="frist" names no step' in done.stdout


def test_an_earlier_runs_results_are_gone_on_from(bundle: Path) -> None:
    earlier = bundle / "earlier.json"
    earlier.write_text("[]")
    assert run_steps(bundle, "resume sweep.json\nstep s 60 true", RESUME=str(earlier)).returncode == 0
    assert (bundle / "out/sweep.json").read_text() == "[]"
    done = run_steps(bundle, "resume sweep.json\nstep s 60 echo begun", RESUME=str(bundle / "absent.json"))
    assert done.returncode == 1
    assert "absent.json" in done.stderr
    assert "names no step" not in done.stdout


def test_a_script_that_breaks_off_is_no_success(bundle: Path) -> None:
    done = run_steps(bundle, "step first 60 true\nexit 3")
    assert done.returncode == 3
    assert "first" in done.stdout


def test_nothing_runs_without_a_whole_bundle(bundle: Path) -> None:
    (bundle / "setup.sh").write_text("echo 'setup: part-2 is to come'; exit 1\n")
    done = run_steps(bundle, "step first 60 echo begun")
    assert done.returncode == 1
    assert "first" not in done.stdout


def test_two_gpus_says_which_parts_need_more_of_a_bundle(bundle: Path) -> None:
    shutil.copy(SCRIPTS / "two_gpus.sh", bundle / "own.sh")
    (bundle / "setup.sh").write_text(
        'mkdir -p "$TARGET" && echo "export PYTHONPATH=$PWD/src BUNDLE_TARGET=$TARGET" >"$TARGET/env.sh"\n'
    )
    folders = {"OUT": str(bundle / "out"), "TARGET": str(bundle / "target"), "TMPDIR": str(bundle)}
    done = run_script(bundle / "own.sh", ONLY="served-demo", **folders)
    assert "served demo needs a bundle of kind served" in done.stdout
    assert done.returncode == 1
