"""What a deployment may not leave behind when it ends: processes, shared memory, files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def private_home() -> Iterator[Path]:
    """A short-named folder with a home and a temporary folder: what is left in it was left by the command."""
    folder = Path(tempfile.mkdtemp(prefix="ap", dir="/tmp"))
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def environment_of(home: Path) -> dict[str, str]:
    """Where a process finds the two."""
    return {"HOME": str(home / "home"), "TMPDIR": str(home / "tmp")}


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Files of /dev/shm that processes have mapped."""
    found = set()
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= {line.split()[5] for line in maps.splitlines() if " /dev/shm/" in line}
    return found


def running_in(home: Path) -> list[str]:
    """Command lines of processes that have the folder for a home, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is somebody else's
            if process.environ().get("HOME") == str(home / "home"):
                found.append(f"{process.pid} {process.name()} {' '.join(process.cmdline())}")
    return found


def assert_nothing_left(family: list[psutil.Process], shared: set[str], home: Path) -> None:
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive, [" ".join(p.cmdline()) for p in alive]
    assert not running_in(home), "begun since the family was looked at"
    assert not [path for path in shared if Path(path).exists()]
    assert not [path for path in (home / "tmp").iterdir() if path.name.startswith(("antiphon", "ray"))]
    assert not (home / "home" / ".ray").exists()
