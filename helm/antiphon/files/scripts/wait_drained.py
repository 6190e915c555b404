"""Run before a pod's container is stopped: return once nothing needs the processes in it, or after a limit.

A worker is needed while its actor lives: the supervisor ends it after draining it. A router is needed while
it has requests; a router pod that goes alone is drained by nobody but its clients. Only the standard library.
"""

from __future__ import annotations

import argparse
import ssl
import time
import urllib.request
from pathlib import Path

POLL_S = 0.5
GAUGES = ("antiphon_requests_in_flight{", "antiphon_requests_queued{")


def actors_live(proc: Path) -> bool:
    """Whether a Ray actor of a worker or a router runs here; Ray gives its processes the actor's name."""
    for entry in proc.iterdir():
        try:
            title = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:  # it ended meanwhile
            continue
        if title.startswith((b"ray::PrefillActor", b"ray::DecodeActor", b"ray::RouterActor")):
            return True
    return False


def open_requests(url: str) -> float:
    """Requests that a router holds or has waiting; 0 when it does not answer any more."""
    # Our own router, by address: its certificate is for the name that clients use.
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(GAUGES))


def main() -> None:
    """Wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, required=True, help="return after this long at the latest")
    parser.add_argument("--settle-s", type=float, default=0.0, help="return after this long at the earliest")
    parser.add_argument("--metrics-url", help="a router's metrics; absent for workers")
    parser.add_argument("--proc", type=Path, default=Path("/proc"), help="where processes are listed")
    options = parser.parse_args()
    began = time.monotonic()
    time.sleep(min(options.settle_s, options.limit_s))
    while time.monotonic() - began < options.limit_s:
        if not actors_live(options.proc):
            return
        if options.metrics_url is not None and open_requests(options.metrics_url) == 0:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
