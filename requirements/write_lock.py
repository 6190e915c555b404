"""Print requirements/lock.txt: every package of the running environment that no other file here pins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HEADER = """\
# Every package of a development environment, pinned. `make lock` writes this file from the present one.
# torch 2.13.0 names its own triton exactly, in the builds that carry CUDA; the CPU build takes any."""

PINNED = {"triton": "3.7.1"}
"""Versions that other builds of a pinned package ask for, whatever is installed here."""


def listed_elsewhere() -> set[str]:
    """Names that the other files for development pin."""
    texts = [(Path(__file__).parent / name).read_text() for name in ("clients.txt", "sanitizer.txt")]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return {normal(line.partition("==")[0]) for line in lines}


def normal(name: str) -> str:
    """A package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Write the lock to standard output."""
    freeze = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    listed = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    lines = [HEADER]
    elsewhere = listed_elsewhere()
    for line in listed.splitlines():
        name, separator, version = line.partition("==")
        if not separator or name == "pip" or normal(name) in elsewhere:
            continue
        version = PINNED.get(name, re.sub(r"\+.*", "", version))  # a local build's tag is not a release
        lines.append(f"{name}=={version}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
