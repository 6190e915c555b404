"""What one token stream between a worker and a router costs, by candidate transport.

Producer and consumer are two processes on this machine, so CLOCK_MONOTONIC is shared and latency is (decoded
at the consumer) - (encoded at the producer).

Paced: 100 steps/s, latency percentiles and CPU per message of both processes together.
Saturated: as fast as the consumer takes them, messages/s.

    python -m antiphon.benchmarks.token_stream --out benchmarks/results/token_stream.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.benchmarks.token_candidates import (
    PAIRS,
    RAY,
    TOKENS_PER_STEP,
    Load,
    Taken,
    measure_ray,
    step_message,
)
from antiphon.protocol.codec import encode

STEPS_PER_S = 100


@dataclass(frozen=True, slots=True)
class Figures:
    """One candidate's result; times in microseconds."""

    candidate: str
    message_bytes: int
    latency_p50_us: float
    latency_p99_us: float
    cpu_per_message_us: float
    saturated_messages_per_s: float


def _producer_process(candidate: str, port: int, load: Load, cpu: Any) -> None:
    start = time.process_time()
    asyncio.run(PAIRS[candidate][0](port, load))
    cpu.value = time.process_time() - start


def _pair_measure(candidate: str, port: int, load: Load) -> tuple[Taken, float]:
    spawn = multiprocessing.get_context("spawn")
    cpu = spawn.Value("d", 0.0)
    producer = spawn.Process(target=_producer_process, args=(candidate, port, load, cpu))
    producer.start()
    start = time.process_time()
    taken: Taken = asyncio.run(PAIRS[candidate][1](port, load))
    own = time.process_time() - start
    producer.join(timeout=30)
    return taken, own + cpu.value


def measure(candidate: str, port: int, seconds: float, burst: int) -> Figures:
    """Run one candidate paced and saturated."""

    def run(load: Load, port: int) -> tuple[Taken, float]:
        return measure_ray(load) if candidate == RAY else _pair_measure(candidate, port, load)

    taken, cpu_s = run(Load(int(seconds * STEPS_PER_S), STEPS_PER_S), port)
    ordered = sorted(taken.latencies_us[STEPS_PER_S // 2 :])  # the first half second warms up
    flood, _ = run(Load(burst, 0), port + 1)
    return Figures(
        candidate,
        len(encode(step_message(1))),
        round(ordered[len(ordered) // 2], 1),
        round(ordered[int(len(ordered) * 0.99)], 1),
        round(cpu_s / len(taken.latencies_us) * 1e6, 1),
        round((len(flood.latencies_us) - 1) / (flood.last - flood.first), 0),
    )


def median(rounds: list[Figures]) -> Figures:
    """Each figure's median over the rounds."""
    fields = [field.name for field in dataclasses.fields(Figures) if field.name != "candidate"]
    return Figures(
        rounds[0].candidate,
        **{name: statistics.median(getattr(figures, name) for figures in rounds) for name in fields},
    )


def main() -> None:
    """Measure every candidate and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--burst", type=int, default=20_000)
    parser.add_argument("--port", type=int, default=42_400)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import ray

    rounds: dict[str, list[Figures]] = {candidate: [] for candidate in [*PAIRS, RAY]}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        for number in range(options.rounds):
            for index, candidate in enumerate(rounds):
                port = options.port + 2 * (number * len(rounds) + index)
                rounds[candidate].append(measure(candidate, port, options.seconds, options.burst))
                print(rounds[candidate][-1])
    finally:
        ray.shutdown()
    results = [median(figures) for figures in rounds.values()]
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
            "shape": {"tokens_per_step": TOKENS_PER_STEP, "steps_per_s": STEPS_PER_S},
            "load_average_1m": os.getloadavg()[0],
            "rounds": {name: [asdict(figures) for figures in runs] for name, runs in rounds.items()},
            "results": [asdict(result) for result in results],
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
