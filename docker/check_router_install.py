"""Run the install steps of the router image in a fresh environment and measure what they put there.

Fails when it is more than LIMIT_BYTES, when torch comes along, when the router cannot be imported, or when a
node of Ray does not answer the health check by which Kubernetes watches it. Needs the package index.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
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
"""
HEALTHY_S = 60.0


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder; links count as nothing."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def check_health(python: str, folder: str) -> None:
    """Start a node of Ray as KubeRay does and ask its agent until it says that all is well.

    Raises:
        TimeoutError: it never did.
    """
    with contextlib.ExitStack() as probes:
        ports = [probes.enter_context(socket.socket()) for _ in range(2)]
        for port in ports:
            port.bind(("127.0.0.1", 0))
        gcs, agent = (port.getsockname()[1] for port in ports)
    start = [
        python,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--num-cpus=0",
        "--num-gpus=0",
    ]
    options = [f"--port={gcs}", f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}/ray"]
    node = subprocess.Popen(
        [*start, *options, "--node-ip-address=127.0.0.1", "--object-store-memory=83886080"],
        env={
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + HEALTHY_S
        while not _answers(f"http://127.0.0.1:{agent}/api/healthz"):
            if time.monotonic() > deadline or node.poll() is not None:
                raise TimeoutError(f"no health from Ray's agent in {HEALTHY_S:.0f} s")
            time.sleep(0.5)
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError):
        return False


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
        # Not into the repository, where the next wheel would pick up what this one left.
        extra = Path(scratch) / "build.cfg"
        extra.write_text(f"[build]\nbuild_base = {scratch}/build\n")
        told = {**os.environ, "DIST_EXTRA_CONFIG": str(extra)}
        subprocess.run([*build, "--wheel-dir", scratch, str(ROOT)], check=True, env=told)
        (wheel,) = Path(scratch).glob("antiphon-*.whl")
        subprocess.run([*install, "--no-deps", str(wheel)], check=True)
        subprocess.run([python, "-c", IMPORTS], check=True, cwd=scratch)
        size = size_of(environment)
        sys.stdout.write(f"router image installs {size / 1e6:.0f} MB of at most {LIMIT_BYTES / 1e6:.0f} MB\n")
        check_health(python, scratch)
    return 0 if size <= LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
