"""Files that a command writes at its end, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from antiphon.protocol.errors import AntiphonError


class OutputUnusable(AntiphonError):
    """A file could not be written at the end; the message names it."""


def check_writable(*files: Path | None) -> None:
    """Make the folders of the files that are asked for, and see that files can be put there.

    Raises:
        OutputUnusable: one cannot be written.
    """
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise OutputUnusable(f"{file}: is a folder, not a file to write")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputUnusable(f"{file.parent}: {error.strerror}") from error
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise OutputUnusable(f"{file.parent}: no file can be written in this folder")
