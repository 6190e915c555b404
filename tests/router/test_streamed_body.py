"""Tokens that are written straight from the dispatcher: in order, bounded, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.http_connection import StreamedBody
from antiphon.router.openai.chat_writer import ChatStream
from antiphon.router.served_model import ServedModel

LONG = ServedModel(name="tiny", max_context_tokens=60_000, created=0, fingerprint="fp")


def post(body: dict) -> bytes:
    encoded = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


def text_of(raw: str) -> str:
    """The content of all events, whatever HTTP chunks they came in."""
    events = [line[6:] for line in raw.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"] for event in events]
    return "".join(choice[0]["delta"].get("content", "") for choice in choices if choice)


@pytest.fixture
def shortcuts(monkeypatch):
    """Counts parts that were written without a turn of the request's task."""
    written = []
    original = StreamedBody.write
    monkeypatch.setattr(
        StreamedBody, "write", lambda self, body: written.append(body) or original(self, body)
    )
    return written


async def test_most_tokens_take_the_shortcut_one_event_each(deploy, shortcuts):
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 100))))
    response = await deployment.chat(stream=True)
    assert text_of(response.text) == "x" * 100
    assert len(shortcuts) > 90
    assert all(part.count(b"data: ") == 1 for part in shortcuts)


async def test_a_reader_in_bursts_misses_nothing(deploy, shortcuts, until):
    text = "".join(chr(97 + i % 26) for i in range(40_000))
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, text)))
    deployment = await deploy(workers, LONG, slow_client_buffer_tokens=100_000)
    url = httpx.URL(deployment.server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (url.host, url.port))
    received = bytearray()
    try:
        await loop.sock_sendall(client, post({"stream": True}))
        # The sockets fill up, and the rest waits in the router.
        await until(lambda: workers.workers["d0"].batches > 40_000, seconds=200)
        while not received.endswith(b"0\r\n\r\n"):
            received += await asyncio.wait_for(loop.sock_recv(client, 1 << 16), 60)
    finally:
        client.close()
    assert 100 < len(shortcuts) < 39_000
    assert text_of(received.decode()) == text


async def test_requests_sent_in_one_go_are_answered_in_turn(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, "hello"))))
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(post({"stream": True}) * 3)
    raw = ""
    async with asyncio.timeout(60):
        while raw.count("[DONE]") < 3:
            raw += (await reader.read(1 << 16)).decode()
    writer.close()
    assert text_of(raw) == "hello" * 3
    assert raw.count("HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("tokens_per_step", [2, 3, 4, 5])
async def test_a_stop_text_in_the_last_tokens(deploy, tokens_per_step):
    """The engine's own end comes with the tokens that hold the stop text, and the request ends once."""
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "abcdefEND")))
    workers.tokens_per_step = tokens_per_step
    deployment = await deploy(workers)
    for stream in (False, True):
        response = await deployment.chat(stream=stream, stop="END")
        assert "abcdef" in (text_of(response.text) if stream else response.text)
        assert "END" not in response.text
        assert '"finish_reason":"stop"' in response.text
    assert await deployment.metric("request_success_total") == 2
    assert not deployment.server.open_requests


async def test_a_crash_is_the_requests_own(deploy, monkeypatch, until):
    """A bug in what one stream writes ends that stream; the batch that it was part of goes on."""
    workers = ScriptedGateway(
        lambda request: byte_answer((CONTENT, "goodgood?" if request.sampling.seed == 13 else "good" * 9))
    )
    deployment = await deploy(workers)
    original = ChatStream.tokens

    def crash(self, event):
        body = original(self, event)
        if b'"content":"?"' in body:
            raise RuntimeError("a bug")
        return body

    monkeypatch.setattr(ChatStream, "tokens", crash)
    requests = [deployment.chat(stream=True, seed=seed) for seed in (11, 12, 13, 14, 15)]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(answers.pop(2), httpx.RemoteProtocolError)
    assert [text_of(answer.text) for answer in answers] == ["good" * 9] * 4
    await until(lambda: not deployment.server.open_requests)
    assert not workers.workers["d0"].requests
    assert await deployment.metric("request_errors_total", error_type="server_error") == 1
