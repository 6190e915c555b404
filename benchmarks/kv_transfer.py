"""How fast KV moves between two processes of this machine, by the size of a descriptor.

One NIXL write of a fixed number of bytes is split into equal runs that are neighbours on neither side, from
one process's registered host memory into another's. Both ends poll as a worker's transfer thread does.
Reported: the time from posting to completion (median), GB/s (1e9 bytes), and the time that posting takes.

    python -m antiphon.benchmarks.kv_transfer --out benchmarks/results/kv_transfer.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.transport import Copies, Memory, WriteState

POLL_S = 0.0003
KIB = 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """One descriptor size."""

    run_bytes: int
    runs: int
    total_bytes: int
    post_ms: float
    total_ms: float
    gigabytes_per_s: float


def receive(pipe: Connection, size: int) -> None:
    """Own the destination and poll until told to end."""
    data = np.zeros(size, dtype=np.uint8)
    transport = NixlTransport("benchmark/receiver")
    transport.register([Memory(data.ctypes.data, size)])
    pipe.send((transport.metadata(), data.ctypes.data))
    while not pipe.poll(POLL_S):
        transport.notifications()
    transport.close()


def spread(total: int, run: int) -> NDArray[np.int64]:
    """[N, 3] runs of ``run`` bytes with a gap of the same size between neighbours on both sides."""
    start = np.arange(total // run, dtype=np.int64) * run * 2
    return np.stack((start, start, np.full_like(start, run)), axis=1)


def measure(sender: NixlTransport, peer: str, local: Memory, remote: Memory, total: int, run: int) -> Figures:
    """Median of several writes."""
    runs = spread(total, run)
    posts, totals = [], []
    for _ in range(7):
        start = time.perf_counter()
        write = sender.post_write(peer, [Copies(local, remote, runs)], b"done")
        posts.append(time.perf_counter() - start)
        while (state := sender.state(write)) is WriteState.IN_PROGRESS:
            time.sleep(0)
        totals.append(time.perf_counter() - start)
        if state is not WriteState.DONE:
            raise RuntimeError(f"a write ended as {state}")
        sender.release(write)
    seconds = statistics.median(totals)
    return Figures(
        run,
        len(runs),
        total,
        round(statistics.median(posts) * 1e3, 3),
        round(seconds * 1e3, 3),
        round(total / seconds / 1e9, 2),
    )


def main() -> None:
    """Measure every size and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    total = options.megabytes * KIB * KIB
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs, 2 * total), daemon=True)
    process.start()
    metadata, address = pipe.recv()
    source = np.ones(2 * total, dtype=np.uint8)
    sender = NixlTransport("benchmark/sender")
    local, remote = Memory(source.ctypes.data, 2 * total), Memory(address, 2 * total)
    sender.register([local])
    peer = sender.connect(metadata)
    results = []
    for run in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, total):
        results.append(measure(sender, peer, local, remote, total, run))
        print(results[-1])
    pipe.send("end")
    process.join()
    sender.close()
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        record = {
            "commit": commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "load_average_1m": os.getloadavg()[0],
            "results": [asdict(result) for result in results],
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
