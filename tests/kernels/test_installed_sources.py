"""What a library is compiled from, and named by, comes with an installation."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from antiphon.cluster.cli_kernels import LIBRARIES

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_every_source_and_header_is_package_data() -> None:
    """Where one is missing, nothing is built and no worker finds what was."""
    patterns = tomllib.loads(PROJECT.read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for library in LIBRARIES for path in (*library.sources, *library.headers)]
    assert [str(path) for path in files if not any(fnmatch(path.name, each) for each in patterns)] == []
