"""The measurement of how workers start, as far as a machine without a GPU goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.benchmarks import load, start_up
from antiphon.benchmarks.parts import Part


def test_every_part_names_what_exists(tmp_path: Path) -> None:
    chosen = start_up.parts(tmp_path, tmp_path)
    assert len({part.name for part in chosen}) == len(chosen)
    for part in chosen:
        files = [Path(argument) for argument in part.arguments if argument.endswith(".py")]
        assert all(file.is_file() for file in files)
        assert files or "antiphon.benchmarks.load" in part.arguments


def test_loads_are_started_with_options_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(load, "make_checkpoint", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(load, "measure", lambda *_: [])
    for part in start_up.parts(tmp_path, tmp_path):
        if "antiphon.benchmarks.load" in part.arguments:
            assert load.main(part.arguments[2:]) == 0
    assert [like for _, like, _ in seen] == ["gpt-oss-20b", "gpt-oss-20b"]


@pytest.mark.parametrize("failing", [None, "sanitizer", "load of gpt-oss-120b"])
def test_one_part_that_fails_is_told_and_nothing_is_left(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run(part: Part, deadline: float, log: object = None) -> bool:
        begun.append(part.name)
        return failing is None or not part.name.startswith(failing)

    monkeypatch.setattr(start_up, "build_kernels", lambda _: True)
    monkeypatch.setattr(start_up, "run", run)
    monkeypatch.setattr("antiphon.benchmarks.parts.run", run)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    status = start_up.main(["--out", str(tmp_path / "out"), "--scratch", str(scratch)])
    assert status == (0 if failing is None else 1)
    assert len(begun) == 5
    assert begun[-1].startswith("load of gpt-oss-120b")
    assert list(scratch.iterdir()) == []


def killed_run(parent: Path) -> Path:
    """A scratch folder as a run leaves it that is killed in the middle."""
    code = (
        "import os, sys; from pathlib import Path; from antiphon.benchmarks.start_up import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'gpt-oss-20b').mkdir(); (folder / 'gpt-oss-20b' / 'half').touch(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(parent)], check=False).returncode == 9
    return parent / start_up.SCRATCH


def test_what_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    left = killed_run(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "kept").touch()
    (left / "link").symlink_to(elsewhere)
    assert (left / "gpt-oss-20b" / "half").exists()
    with start_up.scratch_folder(tmp_path) as folder:
        assert folder == left
        assert [path.name for path in folder.iterdir()] == [start_up.MARK]
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert (elsewhere / "kept").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / start_up.SCRATCH
    theirs.mkdir()
    (theirs / "thesis").touch()
    with pytest.raises(SystemExit, match="was not made by"), start_up.scratch_folder(tmp_path):
        pass
    assert (theirs / "thesis").exists()
    (theirs / "thesis").unlink()
    theirs.rmdir()
    (tmp_path / "other").mkdir()
    target = killed_run(tmp_path / "other")
    theirs.symlink_to(target)
    with pytest.raises(SystemExit, match="was not made by"), start_up.scratch_folder(tmp_path):
        pass
    assert (target / "gpt-oss-20b" / "half").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    with start_up.scratch_folder(tmp_path) as folder:
        (folder / "weights").touch()
        with pytest.raises(SystemExit, match="another run"), start_up.scratch_folder(tmp_path):
            pass
        assert (folder / "weights").exists()
