"""How long a router's event loop stands still while long requests are encoded, on it and beside it.

A router runs in this process in front of scripted workers; its clients are on the same loop, which a ticker
watches. Each request is sent alone, to a router that has its processes already.

    python -m antiphon.benchmarks.router_long_requests --out benchmarks/results/router_long_requests.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import structlog

from antiphon.benchmarks.records import checkout_commit, now, write_json
from antiphon.configs.schema import DeploymentConfig
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer

ANSWER = "<|channel|>final<|message|>ok<|return|>"
MESSAGE_CHARACTERS = 4000
TICK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Stop:
    """One request: ``stopped_ms`` is the longest time in which nothing else ran on the loop."""

    processes: int
    path: str
    characters: int
    status: int
    took_ms: float
    stopped_ms: float


def text_of(characters: int) -> str:
    """Words that no vocabulary has as they are; the same ones each time."""
    letters = random.Random(1)
    words = ["".join(letters.choices("abcdefghij", k=letters.randint(2, 9))) for _ in range(2000)]
    return " ".join(letters.choices(words, k=characters // 3 + 1))[:characters]


def bodies(characters: int) -> dict[str, bytes]:
    """Requests of this size by path."""
    text = text_of(characters)
    pieces = [text[i : i + MESSAGE_CHARACTERS] for i in range(0, characters, MESSAGE_CHARACTERS)]
    messages = [{"role": "user", "content": piece} for piece in pieces]
    return {
        "/v1/chat/completions": json.dumps({"model": "model", "messages": messages}).encode(),
        "/tokenize": json.dumps({"prompt": text}).encode(),
    }


class Ticker:
    """Notes how long the loop took between two of its turns."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            here = time.perf_counter()
            self.longest_s = max(self.longest_s, here - last)
            last = here


async def measure(processes: int, sizes: Sequence[int]) -> list[Stop]:
    """Every path at every size, at a router with so many processes."""
    formatter = HarmonyFormatter()
    answer = formatter.vocabulary.encode_marked(ANSWER)
    config = DeploymentConfig.model_validate(
        {"model": {"path": "none"}, "router": {"port": 0, "encoding_processes": processes}}
    )
    gateway = ScriptedGateway(lambda _: answer)
    server = RouterServer(config, ServedModel("model", 131_072, 0, "fp"), formatter, gateway)
    await server.start()
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run())
    stops = []
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120.0, trust_env=False) as client:
            # The first request finds out how long starting a process takes, which is not asked here.
            await client.post("/tokenize", content=bodies(100_000)["/tokenize"])
            for size in sizes:
                for path, body in bodies(size).items():
                    await asyncio.sleep(0.05)
                    ticker.longest_s, began = 0.0, time.perf_counter()
                    response = await client.post(path, content=body)
                    took_s = time.perf_counter() - began
                    await asyncio.sleep(2 * TICK_S)
                    stops.append(
                        Stop(
                            processes,
                            path,
                            size,
                            response.status_code,
                            round(1e3 * took_s, 1),
                            round(1e3 * ticker.longest_s, 1),
                        )
                    )
    finally:
        ticking.cancel()
        await server.stop(drain=False)
    return stops


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="10000,200000,400000,4000000,12000000", help="in characters")
    parser.add_argument("--processes", default="0,2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sizes = [int(size) for size in options.sizes.split(",")]
    results: list[Stop] = []
    for processes in map(int, options.processes.split(",")):
        for stop in asyncio.run(measure(processes, sizes)):
            results.append(stop)
            print(
                f"{stop.processes} processes, {stop.path}, {stop.characters} characters: {stop.status} after "
                f"{stop.took_ms} ms, the loop stood still for {stop.stopped_ms} ms",
                flush=True,
            )
    if options.out is not None:
        write_json(
            options.out,
            {
                "commit": checkout_commit(),
                "date": now(),
                "cpus": os.cpu_count(),
                "load_average_1m": os.getloadavg()[0],
                "results": [asdict(stop) for stop in results],
            },
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
