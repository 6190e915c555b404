"""The folder of a private Ray cluster, and the processes that belong to it: both end with the deployment.

Ray starts processes whose own children outlive them for a while: agents that still report, workers that have
just begun and make their log's folders anew. All of them have inherited a variable that names the folder, by
which they are found whatever they call themselves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import structlog

log = structlog.get_logger("antiphon.ray")

FOLDER_PREFIX = "antiphon-"
"""The supervisor's process id follows."""

MARK = "ANTIPHON_RAY_FOLDER"
"""Environment variable of every process of the cluster."""

REMOVAL_S = 10.0
"""How long processes are ended and the folder is removed again while any of them is still there."""


def make_private_folder() -> Path:
    """A new one of this process; those that killed supervisors left are removed."""
    _remove_abandoned_folders()
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))


def end_private_folder(folder: Path) -> None:
    """Kill every process of the cluster but this one, and remove the folder, until neither is there."""
    deadline = time.monotonic() + REMOVAL_S
    while True:
        killed = _kill_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not killed and not folder.exists():
            return
        if time.monotonic() > deadline:
            log.warning(
                "a private cluster leaves something behind", folder=str(folder), processes=sorted(killed)
            )
            return
        time.sleep(0.05)


def _kill_processes_of(folder: Path) -> set[int]:
    """Ids of those that were there: they may take a while to end, or have begun another one."""
    needle, found = os.fsencode(folder), set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            # Ray's own processes carry the folder's name among their arguments, until they rename themselves.
            if any(needle in (entry / what).read_bytes() for what in ("cmdline", "environ")):
                os.kill(int(entry.name), signal.SIGKILL)
                found.add(int(entry.name))
    return found


def _remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}[0-9]*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
