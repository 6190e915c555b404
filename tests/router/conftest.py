"""A router on loopback in front of scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

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

    async def wait(condition: Callable[[], object], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  (what is waited for has no event)
                await asyncio.sleep(0.005)

    return wait


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
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=20))
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            stack.push_async_callback(client.close)
            return Deployment(server, workers, http, client)

        yield start
