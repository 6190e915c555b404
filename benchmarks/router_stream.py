"""What the router costs per streamed token: HTTP, Harmony, SSE, with an engine that answers at once.

The router runs in this process with its decode workers beside it: one ``TokenBatch`` per step holds one token
of every stream of a worker, as from a real one. Each token becomes one SSE event; nothing is put together.
The clients are one other process.

Saturated: steps follow each other at once; tokens per second of router CPU are what one core can do.
Paced: half of 15,000 tokens/s, from one worker with all streams, and from four whose steps take turns.

A token's added latency runs from the dispatcher, which is given its whole batch at once, to

* the client's read (CLOCK_MONOTONIC is common to both processes): what else runs on the machine is in it;
* the write into the socket, in CPU time of the router: what the client of an idle machine would wait for.

    python -m antiphon.benchmarks.router_stream --out benchmarks/results/router_stream.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
import uvloop

import antiphon.router.server as server_module
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.messages import Finish, FinishReason, GenerateRequest, TokenOutput
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway, ScriptedWorker
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.http_connection import AbortableProtocol
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer

PACED_TOKENS_PER_S = 7_500
_HEADER = "<|channel|>final<|message|>"
_EVENT = b'"delta":{"content":'
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
    cpu_latency_p50_ms: float
    cpu_latency_p99_ms: float


class SteppingGateway(ScriptedGateway):
    """Waits until every stream is runnable, then sends one batch per worker and step."""

    def __init__(self, answer: list[int], workers: int) -> None:
        super().__init__(lambda _: answer, decode=workers)
        self.answer = answer
        self.runnable: dict[str, list[GenerateRequest]] = {f"d{i}": [] for i in range(workers)}
        self.emitted: dict[str, list[Instant]] = {worker_id: [] for worker_id in self.runnable}

    @property
    def streams(self) -> int:
        """Streams that wait for their first step."""
        return sum(map(len, self.runnable.values()))

    def _start_decoding(self, worker: ScriptedWorker, request_id: str, attempt: int) -> None:
        self.runnable[worker.address.worker_id].append(worker.requests[request_id])

    async def run(self, step_s: float) -> None:
        """Every step of every stream, a worker's ``step_s`` apart; workers take turns within it."""
        began = time.monotonic()
        turn_s = step_s / len(self.runnable)
        for position in range(len(self.answer)):
            for turn, worker_id in enumerate(self.runnable):
                due = began + position * step_s + turn * turn_s
                await asyncio.sleep(max(due - time.monotonic(), 0) if step_s else 0)
                self._step(worker_id, position)
        for worker_id, requests in self.runnable.items():
            for request in requests:
                del self.workers[worker_id].requests[request.request_id]

    def _step(self, worker_id: str, position: int) -> None:
        last = position == len(self.answer) - 1
        finish = Finish(FinishReason.STOP) if last else None
        token = self.answer[position]
        outputs = [
            TokenOutput(r.request_id, r.attempt, position, [token], None, finish)
            for r in self.runnable[worker_id]
        ]
        self.emitted[worker_id].append(now())
        self._batch(self.workers[worker_id], *outputs)


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment: seconds of CLOCK_MONOTONIC, and of this thread's CPU time."""

    wall: float
    cpu: float


def now() -> Instant:
    """This moment."""
    return Instant(time.monotonic(), time.thread_time())


class WriteTimes:
    """When the content events of each connection were written, in CPU seconds; by the client's port."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[float]] = {}

    def protocol_class(self, head_timeout_s: float, body_timeout_s: float) -> type[AbortableProtocol]:
        """The server's protocol with a transport that notes its writes."""
        times, head_s, body_s = self, head_timeout_s, body_timeout_s

        class TimedProtocol(AbortableProtocol):
            head_timeout_s = head_s
            body_timeout_s = body_s

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(TimedTransport(transport, times))  # type: ignore[arg-type]

        return TimedProtocol


class TimedTransport:
    """Delegates to a transport, and notes when content events were written."""

    def __init__(self, transport: asyncio.Transport, times: WriteTimes) -> None:
        self._transport = transport
        port = transport.get_extra_info("peername")[1]
        self._times = times.cpu.setdefault(str(port), [])

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Pass on."""
        self._transport.write(data)
        if events := data.count(_EVENT):
            self._times += [time.thread_time()] * events


async def measure(shape: Shape, step_s: float, formatter: HarmonyFormatter, workers: int = 1) -> Figures:
    """One run of all streams."""
    text = formatter.encode(_TEXT * (shape.tokens // 10))
    header = formatter.vocabulary.encode_marked(_HEADER)
    answer = [*header, *text[: shape.tokens - len(header)]]
    gateway = SteppingGateway(answer, workers)
    config = DeploymentConfig.model_validate({"model": {"path": "none"}, "router": {"port": 0}})
    written = WriteTimes()
    setattr(server_module, "protocol_class", written.protocol_class)  # noqa: B010  (of another module)
    server = RouterServer(config, ServedModel("model", 131_072, 0, "fp"), formatter, gateway)
    await server.start()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "antiphon.benchmarks.router_stream", "--client", server.url, str(shape.streams),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    while gateway.streams < shape.streams:  # noqa: ASYNC110  (the gateway has no event for it)
        await asyncio.sleep(0.01)
    began, cpu = time.monotonic(), time.process_time()
    await gateway.run(step_s)
    while server.open_requests:  # noqa: ASYNC110  (polled coarsely, so that it costs nothing)
        await asyncio.sleep(0.005)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    output, _ = await client.communicate()
    await server.stop(drain=False)
    streams: list[Stream] = [Stream(**fields) for fields in json.loads(output)]
    tokens = shape.streams * len(answer)
    wall_ms, cpu_ms = added_latencies(streams, gateway, written, skip=len(header))
    return Figures(
        tokens=tokens,
        events=len(wall_ms),
        wall_s=round(wall_s, 3),
        router_cpu_s=round(cpu_s, 3),
        tokens_per_s=round(tokens / wall_s),
        tokens_per_router_cpu_s=round(tokens / cpu_s),
        router_cpu_us_per_token=round(1e6 * cpu_s / tokens, 2),
        latency_p50_ms=percentile(wall_ms, 0.5),
        latency_p99_ms=percentile(wall_ms, 0.99),
        cpu_latency_p50_ms=percentile(cpu_ms, 0.5),
        cpu_latency_p99_ms=percentile(cpu_ms, 0.99),
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """What a client saw of one stream: its own port, the worker, and when each content event was read."""

    port: str
    worker_id: str
    arrivals: list[float]


def added_latencies(
    streams: list[Stream], gateway: SteppingGateway, written: WriteTimes, skip: int
) -> tuple[list[float], list[float]]:
    """Milliseconds that the router added to each text token, to its read and in CPU time to its write.

    Content events, one per text token, come in order: the i-th belongs to the i-th token after ``skip``.
    """
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    for stream in streams:
        emitted = gateway.emitted[stream.worker_id][skip:]
        wall_ms += [1e3 * (a - e.wall) for a, e in zip(stream.arrivals, emitted, strict=True)]
        cpu_ms += [1e3 * (w - e.cpu) for w, e in zip(written.cpu[stream.port], emitted, strict=True)]
    return wall_ms, cpu_ms


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return round(sorted(values)[int(len(values) * share)], 3)


async def read_streams(url: str, streams: int) -> list[Stream]:
    """Read all streams to their ends."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "model", "stream": True, "messages": [{"role": "user", "content": "Go."}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def one() -> Stream:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        own_port = str(writer.get_extra_info("sockname")[1])
        start = await reader.readuntil(b"\r\n\r\n")
        worker_id = start.split(b"x-antiphon-workers: ")[1].split(b",")[0].decode()
        arrivals: list[float] = []
        tail = b""
        while b"[DONE]" not in tail:
            data = tail[-32:] + await reader.read(1 << 16)
            now = time.monotonic()
            # An event may be cut in two: the end of the last read is looked at again,
            # but not its own matches.
            count = data.count(_EVENT) - tail[-32:].count(_EVENT)
            arrivals.extend([now] * count)
            tail = data
        writer.close()
        return Stream(own_port, worker_id, arrivals)

    return list(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> None:
    """Measure, print and write the figures."""
    if sys.argv[1:2] == ["--client"]:
        print(
            json.dumps([asdict(stream) for stream in uvloop.run(read_streams(sys.argv[2], int(sys.argv[3])))])
        )
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape(options.streams, options.tokens)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    formatter = HarmonyFormatter()
    results = {
        "saturated": uvloop.run(measure(shape, 0.0, formatter)),
        "paced": uvloop.run(measure(shape, shape.streams / PACED_TOKENS_PER_S, formatter)),
        "paced, 4 workers": uvloop.run(measure(shape, shape.streams / PACED_TOKENS_PER_S, formatter, 4)),
    }
    for name, figures in results.items():
        print(name, json.dumps(asdict(figures), indent=2))
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
