"""Write the locks of the container images: each package at its version, with the hash of its wheel.

Versions are those of requirements/lock.txt, so images run what was tested. What an image needs beyond it is
resolved now: the CUDA libraries of torch, and the dashboard of Ray, by which Kubernetes sees a node's health.
Run it on x86-64 Linux with the Python version of the images.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RAY_ON_KUBERNETES = "ray[default]"
IMAGES = {"router": (), "worker": ("worker",)}
"""Image -> extras of the project that it needs besides the plain dependencies."""

HEADER = """\
# Every package of the {image} image, with the hash of its wheel for CPython {python} on x86-64 Linux.
# requirements/write_image_locks.py writes this file; `make lock` runs it.
"""


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What the project asks for, and what builds it."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = metadata["project"]
    wanted = [*metadata["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [*wanted, RAY_ON_KUBERNETES]


def resolve(wanted: list[str], constraints: Path) -> dict[str, tuple[str, str]]:
    """Package -> (version, sha256), as pip would install them."""
    # Only the public index: a wheel of this machine has a hash that nobody else can fetch.
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        options = ["--only-binary", ":all:", "--report", str(report), "--constraint", str(constraints)]
        subprocess.run([*pip, *options, *wanted], check=True, env=environment)
        installs = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"]: (
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in installs
    }


def render(image: str, packages: dict[str, tuple[str, str]]) -> str:
    """The lock as text, in the form that ``pip install --require-hashes`` reads."""
    lines = [HEADER.format(image=image, python=f"{sys.version_info.major}.{sys.version_info.minor}")]
    for name in sorted(packages, key=lambda name: re.sub(r"[-_.]+", "-", name).lower()):
        version, digest = packages[name]
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(lines)


def main() -> int:
    """Write requirements/image-IMAGE.txt of each image named, or of all."""
    for image in sys.argv[1:] or IMAGES:
        packages = resolve(requirements(IMAGES[image]), ROOT / "requirements/lock.txt")
        (ROOT / f"requirements/image-{image}.txt").write_text(render(image, packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
