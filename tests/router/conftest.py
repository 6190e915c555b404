"""A router on loopback in front of scripted workers, on a loop whose time is that of its process alone."""

from __future__ import annotations

import asyncio
import inspect
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.configs.schema import DeploymentConfig
from antiphon.router.byte_format import CONTENT, ByteFormatter, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.formatter import ChatFormatter
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer
from antiphon.telemetry.tracing import Tracer

MODEL = ServedModel(name="tiny", max_context_tokens=512, created=1_700_000_000, fingerprint="fp_test")
HANGS_AFTER_S = 60.0
"""Nothing here takes so long on the slowest machine, unless it never comes."""
LONGEST_ARRIVAL_S = 0.01
"""What one end of a connection has sent on this machine is there for the other end within it."""
SKIPPED_AFTER_S = 0.001
"""A loop that skips waits looks for so long whether something comes."""


class _CountedWaits(selectors.DefaultSelector):
    """Knows how long its loop had nothing to do; for how long the process was not run does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = time.monotonic()
        self.skips = False

    def select(self, timeout: float | None = None) -> Any:
        if self.skips and timeout is not None and timeout > SKIPPED_AFTER_S:
            if ready := super().select(SKIPPED_AFTER_S):
                return ready
            self.waited_s += timeout
            return []
        began = time.monotonic()
        ready = super().select(timeout)
        waited_s = time.monotonic() - began
        if timeout is not None:
            waited_s = min(waited_s, max(timeout, 0.0))
        self.waited_s += min(waited_s, LONGEST_ARRIVAL_S) if ready else waited_s
        return ready


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """Its clock is what its thread has computed and waited for, whatever else the machine does meanwhile.

    Client and server share it, so that neither is late for the other where both are held up.
    """

    def __init__(self) -> None:
        self._waits = _CountedWaits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.waited_s + time.thread_time()

    def skip_waits(self) -> None:
        """From now on what nobody but timers would end is over at once; not where another process works."""
        self._waits.skips = True

    def pass_time(self, seconds: float) -> None:
        """Let so long have passed: what is due until then comes next, in order."""
        self._waits.waited_s += seconds


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test of this folder runs on such a loop."""
    return {"own time": OwnTimeLoop}


@dataclass
class Deployment:
    """A running router, its workers, and clients of it."""

    server: RouterServer
    workers: ScriptedGateway
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def chat(self, **fields: object) -> httpx.Response:
        """POST a chat completion; a user message and the model are given."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels."""
        text = (await self.http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"antiphon_{name}" and labels.items() <= sample.labels.items()
        )


Deploy = Callable[..., Awaitable[Deployment]]


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """``await until(lambda: ...)``: wait for something that only another task can bring about."""

    async def wait(condition: Callable[[], object], seconds: float = HANGS_AFTER_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                seen = inspect.getclosurevars(condition).nonlocals if inspect.isfunction(condition) else {}
                pytest.fail(f"still not so after {seconds:g} s: {condition} of {seen}")
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def pass_time() -> Callable[[float], None]:
    """``pass_time(60)``: a minute is over, for all that waits on the test's loop."""

    def move_on(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OwnTimeLoop)
        loop.pass_time(seconds)

    return move_on


@pytest.fixture
async def deploy() -> AsyncIterator[Deploy]:
    """Start a router: ``await deploy(workers, max_attempts=2)``; keywords are keys of its section."""
    async with AsyncExitStack() as stack:

        async def start(
            workers: ScriptedGateway | None = None,
            model: ServedModel = MODEL,
            formatter: ChatFormatter | None = None,
            metrics: dict[str, object] | None = None,
            tracer: Tracer | None = None,
            **router: object,
        ) -> Deployment:
            workers = workers or ScriptedGateway(lambda _: byte_answer((CONTENT, "hello")))
            config = DeploymentConfig.model_validate(
                {
                    "model": {"path": "tiny"},
                    "router": {"port": 0, "drain_timeout_s": 1.0, **router},
                    "metrics": metrics or {},
                }
            )
            server = RouterServer(config, model, formatter or ByteFormatter(), workers, tracer)
            await server.start()
            stack.push_async_callback(server.stop, drain=False)
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.url, timeout=HANGS_AFTER_S)
            )
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            stack.push_async_callback(client.close)
            return Deployment(server, workers, http, client)

        yield start
