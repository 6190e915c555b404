"""What belongs to a private cluster ends with its folder, whatever it calls itself and writes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from antiphon.cluster import private_folder

WRITER = """
import os, sys, time
folder, children = sys.argv[1].replace("|", "/"), int(sys.argv[2])
for _ in range(children):
    if os.fork() == 0:
        os.setsid()
        break
    time.sleep(0.01)
os.write(1, b"began\\n")  # in one piece: print may write the end of the line by itself
while True:
    os.makedirs(os.path.join(folder, "session", "logs"), exist_ok=True)
    time.sleep(0.001)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "antiphon-1-x"
    (made / "session").mkdir(parents=True)
    return made


@pytest.fixture
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is known by its environment alone, and children of its own, which nobody waits for."""
    hidden = str(folder).replace("/", "|")
    environment = {**os.environ, private_folder.MARK: str(folder)}
    command = [sys.executable, "-c", WRITER, hidden, "3"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        family = {parent}
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(4)] == ["began\n"] * 4
            family.update(parent.children(recursive=True))
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                family.update(parent.children(recursive=True))
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def test_everything_that_has_the_mark_ends_and_the_folder_goes(
    folder: Path, writer: subprocess.Popen[str]
) -> None:
    family = [psutil.Process(writer.pid), *psutil.Process(writer.pid).children(recursive=True)]
    assert len(family) == 4
    with capture_logs() as logs:
        private_folder.end_private_folder(folder)
    assert not folder.exists()
    assert not logs
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not folder.exists()


def test_processes_of_another_cluster_are_left_alone(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    other = tmp_path / "antiphon-2-y"
    other.mkdir()
    private_folder.end_private_folder(other)
    assert not other.exists()
    assert writer.poll() is None


def test_a_folder_goes_though_something_still_writes_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals, remove = [], private_folder.shutil.rmtree

    def written_meanwhile(path: Path, *, ignore_errors: bool) -> None:
        removals.append(path)
        remove(path, ignore_errors=ignore_errors)
        if len(removals) < 3:
            (folder / "session" / "logs").mkdir(parents=True)

    monkeypatch.setattr(private_folder.shutil, "rmtree", written_meanwhile)
    private_folder.end_private_folder(folder)
    assert removals == [folder] * 3
    assert not folder.exists()


def test_what_does_not_go_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "REMOVAL_S", 0.2)
    monkeypatch.setattr(private_folder.shutil, "rmtree", lambda path, ignore_errors: None)
    with capture_logs() as logs:
        private_folder.end_private_folder(folder)
    assert [each["folder"] for each in logs] == [str(folder)]


def test_folders_of_supervisors_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    abandoned, mine = (tmp_path / f"antiphon-{pid}-z" for pid in (dead.pid, os.getpid()))
    abandoned.mkdir()
    mine.mkdir()
    made = private_folder.make_private_folder()
    assert not abandoned.exists()
    assert mine.exists()
    assert made.name.startswith(f"antiphon-{os.getpid()}-")
