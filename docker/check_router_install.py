"""Run the install steps of the router image in a fresh environment and measure what they put there.

Fails when it is more than LIMIT_BYTES, when torch comes along, or when the router cannot be imported. The
package index must be in reach.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements/image-router.txt"
LIMIT_BYTES = 450 * 10**6
IMPORTS = """
import importlib.util, sys
import antiphon.cluster.actors, antiphon.cluster.cli, antiphon.router.server
from antiphon.router.harmony.formatter import HarmonyFormatter
assert importlib.util.find_spec("torch") is None, "torch was installed"
assert "ray" not in sys.modules, "importing the actors imported Ray"
import ray.dashboard.optional_deps
"""


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder; links count as nothing."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> int:
    """Install, import, measure; 0 when all is well."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "venv"
        venv.create(environment, with_pip=False)
        python = str(environment / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet", "--no-compile", "--no-cache-dir"]
        subprocess.run([*install, "--require-hashes", "--requirement", str(LOCK)], check=True)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*build, "--wheel-dir", scratch, str(ROOT)], check=True)
        (wheel,) = Path(scratch).glob("antiphon-*.whl")
        subprocess.run([*install, "--no-deps", str(wheel)], check=True)
        subprocess.run([python, "-c", IMPORTS], check=True, cwd=scratch)
        size = size_of(environment)
    sys.stdout.write(f"router image installs {size / 1e6:.0f} MB of at most {LIMIT_BYTES / 1e6:.0f} MB\n")
    return 0 if size <= LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
