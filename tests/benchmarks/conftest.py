"""A server that answers at known times, for load generators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

TEMPLATE_TOKENS = 11


@dataclass
class ScriptedServer:
    """OpenAI's API with an answer of exact length, and delays that a test chooses."""

    first_s: float = 0.02
    gap_s: float = 0.005
    token_ids: bool = True
    """Take prompts of token ids on /v1/completions."""
    refuse: int | None = None
    """Answer generation with this status."""
    drop_after: int | None = None
    """Close the connection after so many tokens."""
    tokens_per_event: int = 1
    nonsense: bytes | None = None
    """Sent as an event in place of the answer."""
    stall_s: float = 0.0
    """From the first request on, how long the whole server stands still."""
    stall_until_s: float | None = None
    written: list[list[float]] = field(default_factory=list)
    """Of each stream, when each of its events was written, on the clock that the generator reads."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self.route(head.split()[1].decode(), body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def route(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self.document(writer, {"data": [{"id": "scripted"}]})
        if path == "/metrics":
            return self.raw(writer, "404 Not Found", b"{}")
        if path == "/tokenize":
            return self.document(writer, {"count": self.prompt_tokens(body)})
        if not body.get("stream"):
            if "prompt" in body and not self.token_ids:
                return self.raw(writer, "400 Bad Request", b'{"error": {"message": "text only"}}')
            return self.document(writer, {"usage": {"prompt_tokens": self.prompt_tokens(body)}})
        self.bodies.append(body)
        if self.refuse is not None:
            return self.raw(writer, f"{self.refuse} Refused", b'{"error": {"message": "no room"}}')
        await self.stream(body, writer)

    async def stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        if self.stall_until_s is None:
            self.stall_until_s = loop.time() + self.stall_s
        arrived = max(loop.time(), self.stall_until_s)
        tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        await asyncio.sleep(arrived + self.first_s - loop.time())
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
            b"Server-Timing: prefill;dur=12.5, queue;dur=1\r\n\r\n"
        )
        if self.nonsense is not None:
            writer.write(b"data: " + self.nonsense + b"\n\ndata: [DONE]\n\n")
            return
        kind = "text_completion" if "prompt" in body else "chat.completion.chunk"
        times: list[float] = []
        self.written.append(times)
        for index, done in enumerate(range(0, tokens, self.tokens_per_event)):
            # Against the schedule, not after the last sleep, so that errors do not add up.
            await asyncio.sleep(arrived + self.first_s + index * self.gap_s - loop.time())
            if self.drop_after is not None and done >= self.drop_after:
                return
            piece = " word" * min(self.tokens_per_event, tokens - done)
            choice = {"text": piece} if "prompt" in body else {"delta": {"content": piece}}
            chunk = {"object": kind, "choices": [choice]}
            times.append(loop.time())
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
        end = {"object": kind, "choices": []}
        usage = {"prompt_tokens": self.prompt_tokens(body), "completion_tokens": tokens}
        writer.write(b"data: " + json.dumps(end | {"usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        await writer.drain()

    @staticmethod
    def prompt_tokens(body: dict[str, Any]) -> int:
        if "prompt" in body:
            return len(body["prompt"])
        words = sum(len(message["content"].split()) for message in body["messages"])
        return words + TEMPLATE_TOKENS

    def document(self, writer: asyncio.StreamWriter, document: object) -> None:
        self.raw(writer, "200 OK", json.dumps(document).encode())

    @staticmethod
    def raw(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)


Script = Callable[..., Awaitable[ScriptedServer]]


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    """``await script(first_s=0.02)``: a running scripted server."""
    servers: list[asyncio.Server] = []

    async def start(**settings: Any) -> ScriptedServer:
        scripted = ScriptedServer(**settings)
        server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
        servers.append(server)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return scripted

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()
