"""The one go over two GPUs: a part that breaks or hangs leaves the others their time, and what it said."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from antiphon.benchmarks import parts as parts_module
from antiphon.benchmarks.parts import Log, Part, run
from antiphon.benchmarks.rank_sums import LIBRARY, ONE_SHOT, TWO_SHOT, crossovers
from antiphon.benchmarks.records import Record
from antiphon.benchmarks.two_gpus import cpu_parts, gpu_parts, main
from antiphon.model.parallel.reduce_limits import BY_RANKS, ReduceLimits, limits_of

CHILD = (
    "import subprocess, sys; print('begun', flush=True); open(sys.argv[1], 'w').close(); "
    "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
)


class AskedOnceItSaid(subprocess.Popen[str]):
    """A process whose time begins when it, where it is to, has said something."""

    def wait(self, timeout: float | None = None) -> int:
        words: list[str] = self.args  # type: ignore[assignment]
        deadline = time.monotonic() + 60
        while words[2] == CHILD and not Path(words[3]).exists():
            assert time.monotonic() < deadline, "it did not begin"
            time.sleep(0.01)
        return super().wait(timeout)


def test_every_part_ends_in_time_and_what_it_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "GRACE_S", 0.5)
    monkeypatch.setattr(parts_module, "LEAST_S", 1.2)
    monkeypatch.setattr(subprocess, "Popen", AskedOnceItSaid)
    log = Log(tmp_path / "log.txt")
    parts = [
        Part("hangs", ("-c", CHILD, str(tmp_path / "begun")), 1.5),
        Part("breaks", ("-c", "print('half'); raise SystemExit(3)"), 120),
        Part("good", ("-c", "print('whole')"), 120),
    ]
    begin = time.monotonic()
    ended = [run(part, begin + 240, log) for part in parts]
    assert ended == [False, False, True]
    assert time.monotonic() - begin < 240
    assert not run(parts[2], time.monotonic() + 1, log), "no time is left"
    log.close()
    said = (tmp_path / "log.txt").read_text()
    for line in ("begun", "=== hangs ran out of time", "half", "=== breaks ended with 3", "whole"):
        assert line in said
    assert said.endswith("=== good: no time is left\n")


def test_what_comes_back_is_few_files(tmp_path: Path) -> None:
    for parts in (gpu_parts(tmp_path, Path("/m")), cpu_parts(tmp_path)):
        names = [part.name for part in parts]
        assert len(set(names)) == len(names)
        files = {argument for part in parts for argument in part.arguments if argument.endswith(".json")}
        assert len(files) < 8, "and the log"
    arguments = [argument for part in gpu_parts(tmp_path, Path("/m")) for argument in part.arguments]
    assert all(Path(argument).exists() for argument in arguments if argument.endswith(".yaml"))


class Interrupted(subprocess.Popen[str]):
    """A process whose parent is interrupted while it waits for a while."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return super().wait()


def test_a_part_is_ended_even_when_its_parent_is_interrupted_meanwhile() -> None:
    line = ["bash", "-c", "trap '' INT; echo ready; while :; do sleep 0.1; done"]
    with Interrupted(line, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(KeyboardInterrupt):
            parts_module._end_session(process)
        assert process.returncode == -signal.SIGKILL


def test_an_unknown_part_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), "--only", "sums|nonsense"])
    assert "no such part: nonsense" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "out"), "--list", "--only", "sums|texts"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert not (tmp_path / "out").exists()


def test_limits_follow_from_what_was_fastest() -> None:
    times = {
        1: {ONE_SHOT: 6, TWO_SHOT: 9, LIBRARY: 20},
        64: {ONE_SHOT: 14, TWO_SHOT: 15, LIBRARY: 22},
        256: {ONE_SHOT: 40, TWO_SHOT: 28, LIBRARY: 30},
        1024: {ONE_SHOT: 150, TWO_SHOT: 90, LIBRARY: 60},
        4096: {ONE_SHOT: 600, TWO_SHOT: 100, LIBRARY: 200},  # past a gap: no limit says this
    }
    records = [
        Record("all_reduce", "", "TP2", "d", "c", "t", float(value), "us", batch=rows, kernel=name)
        for rows, ways in times.items()
        for name, value in ways.items()
    ]
    assert crossovers(records) == ReduceLimits(64, 256)
    assert crossovers([record for record in records if record.kernel != TWO_SHOT]) == ReduceLimits(64)
    assert ReduceLimits(64, 256).max_rows == 256
    assert limits_of(2) == BY_RANKS[2]
    assert limits_of(3) == BY_RANKS[4]
