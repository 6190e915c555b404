"""What the router costs per streamed token: HTTP, Harmony, SSE, with an engine that answers at once.

The router runs in this process with its decode worker beside it: one ``TokenBatch`` per step holds one token
of every stream, as from a real worker; each token becomes one SSE event, and nothing is put together. The
clients are one other process. CLOCK_MONOTONIC is common to both, so a token's added latency is (read by the
client) - (given to the dispatcher).

Saturated: steps follow each other at once; tokens per second of router CPU are what one core can do.
Paced: half of 15,000 tokens/s; latency percentiles.

    python -m antiphon.benchmarks.router_stream --out benchmarks/results/router_stream.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.messages import Finish, FinishReason, GenerateRequest, TokenOutput
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway, ScriptedWorker
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer

PACED_TOKENS_PER_S = 7_500
_HEADER = "<|channel|>final<|message|>"
_TEXT = "The quick brown fox jumps over the lazy dog and goes on with its day. "


@dataclass(frozen=True, slots=True)
class Shape:
    """Streams at one time and output tokens of each."""

    streams: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One run; CPU is of the router's process, latencies are added per token."""

    tokens: int
    events: int
    wall_s: float
    router_cpu_s: float
    tokens_per_s: float
    tokens_per_router_cpu_s: float
    router_cpu_us_per_token: float
    latency_p50_ms: float
    latency_p99_ms: float


class SteppingGateway(ScriptedGateway):
    """Waits until every stream is runnable, then sends one batch per step."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(lambda _: answer)
        self.answer = answer
        self.runnable: list[GenerateRequest] = []
        self.emitted_at: list[float] = []

    def _start_decoding(self, worker: ScriptedWorker, request_id: str, attempt: int) -> None:
        self.runnable.append(worker.requests[request_id])

    async def run(self, step_s: float) -> None:
        """Every step of every stream, ``step_s`` apart."""
        worker = self.workers["d0"]
        began = time.monotonic()
        for position, token in enumerate(self.answer):
            if step_s:
                await asyncio.sleep(max(began + position * step_s - time.monotonic(), 0))
            else:
                await asyncio.sleep(0)
            last = position == len(self.answer) - 1
            finish = Finish(FinishReason.STOP) if last else None
            outputs = [
                TokenOutput(r.request_id, r.attempt, position, [token], None, finish) for r in self.runnable
            ]
            self.emitted_at.append(time.monotonic())
            self._batch(worker, *outputs)
        for request in self.runnable:
            del worker.requests[request.request_id]


async def measure(shape: Shape, step_s: float, formatter: HarmonyFormatter) -> Figures:
    """One run of all streams."""
    text = formatter.encode(_TEXT * (shape.tokens // 10))
    header = formatter.vocabulary.encode_marked(_HEADER)
    answer = [*header, *text[: shape.tokens - len(header)]]
    gateway = SteppingGateway(answer)
    config = DeploymentConfig.model_validate({"model": {"path": "none"}, "router": {"port": 0}})
    server = RouterServer(config, ServedModel("model", 131_072, 0, "fp"), formatter, gateway)
    await server.start()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "antiphon.benchmarks.router_stream", "--client", server.url, str(shape.streams),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    while len(gateway.runnable) < shape.streams:  # noqa: ASYNC110  (the gateway has no event for it)
        await asyncio.sleep(0.01)
    began, cpu = time.monotonic(), time.process_time()
    await gateway.run(step_s)
    while server.open_requests:  # noqa: ASYNC110  (polled coarsely, so that it costs nothing)
        await asyncio.sleep(0.005)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    output, _ = await client.communicate()
    await server.stop(drain=False)
    arrivals: list[list[float]] = json.loads(output)
    tokens = shape.streams * len(answer)
    # Content events, one per text token, come in order: the i-th belongs to the i-th text token.
    emitted = gateway.emitted_at[len(header) :]
    added = sorted(a - e for stream in arrivals for a, e in zip(stream, emitted, strict=True))
    return Figures(
        tokens=tokens,
        events=sum(map(len, arrivals)),
        wall_s=round(wall_s, 3),
        router_cpu_s=round(cpu_s, 3),
        tokens_per_s=round(tokens / wall_s),
        tokens_per_router_cpu_s=round(tokens / cpu_s),
        router_cpu_us_per_token=round(1e6 * cpu_s / tokens, 2),
        latency_p50_ms=round(1e3 * added[len(added) // 2], 3),
        latency_p99_ms=round(1e3 * added[int(len(added) * 0.99)], 3),
    )


async def read_streams(url: str, streams: int) -> list[list[float]]:
    """Arrival times of the content events of every stream."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "model", "stream": True, "messages": [{"role": "user", "content": "Go."}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def one() -> list[float]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        arrivals: list[float] = []
        tail = b""
        while b"[DONE]" not in tail:
            data = tail[-32:] + await reader.read(1 << 16)
            now = time.monotonic()
            # An event may be cut in two: the end of the last read is looked at again,
            # but not its own matches.
            count = data.count(b'"delta":{"content":') - tail[-32:].count(b'"delta":{"content":')
            arrivals.extend([now] * count)
            tail = data
        writer.close()
        return arrivals

    return list(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> None:
    """Measure, print and write the figures."""
    if sys.argv[1:2] == ["--client"]:
        print(json.dumps(uvloop.run(read_streams(sys.argv[2], int(sys.argv[3])))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape(options.streams, options.tokens)
    formatter = HarmonyFormatter()
    results = {
        "saturated": uvloop.run(measure(shape, 0.0, formatter)),
        "paced": uvloop.run(measure(shape, shape.streams / PACED_TOKENS_PER_S, formatter)),
    }
    for name, figures in results.items():
        print(name, figures)
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
            "shape": asdict(shape) | {"paced_tokens_per_s": PACED_TOKENS_PER_S},
            "load_average_1m": os.getloadavg()[0],
            "results": {name: asdict(figures) for name, figures in results.items()},
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
