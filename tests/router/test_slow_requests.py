"""Clients that send a request slowly, or none: dropped in time, and never in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import httpx
import pytest

from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.served_model import ServedModel

ROOMY = ServedModel(name="tiny", max_context_tokens=10_000_000, created=1, fingerprint="fp")
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


def post(path: str = "/v1/chat/completions", length: int = len(CHAT)) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


@asynccontextmanager
async def connection(deployment) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def trickle(writer: asyncio.StreamWriter, parts: Iterable[bytes], pause_s: float = 0.02) -> bool:
    """Send one part after the other until the server has had enough; whether they were all sent."""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    except ConnectionError:
        return False
    return True


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes, which is a reset where something sent was still unread."""
    parts = []
    with suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts)


def single(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: list[bytes]) -> bytes:
    """All that comes back until the server closes, while the parts are sent; fails where they all were."""
    sending = asyncio.create_task(trickle(writer, parts))
    answer = await all_of(reader)
    assert not sending.done() or not sending.result(), "the client was allowed to send everything"
    sending.cancel()
    return answer


def error_of(answer: bytes) -> tuple[int, str]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"\r\nconnection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


HEADS = {
    "request line": single(b"GET /" + b"a" * 2000),
    "header value": [GET[:-4], *single(b"a" * 2000)],
    "headers": [GET[:-2], *(b"x-%d: 1\r\n" % i for i in range(2000))],
}


@pytest.mark.parametrize("parts", HEADS.values(), ids=HEADS)
async def test_a_head_in_small_pieces_is_408(deploy, parts):
    deployment = await deploy(head_timeout_s=0.3)
    async with connection(deployment) as (reader, writer):
        assert error_of(await refused(reader, writer, parts)) == (408, "request_timeout")
    assert (await deployment.chat()).status_code == 200


async def test_a_second_head_is_bounded_as_the_first(deploy):
    deployment = await deploy(head_timeout_s=0.3)
    async with connection(deployment) as (reader, writer):
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        assert error_of(await refused(reader, writer, single(GET[:-4] + b"a" * 2000))) == (
            408,
            "request_timeout",
        )


@pytest.mark.parametrize("parts", [[], [b"\r\n"] * 2000], ids=["nothing", "line ends"])
async def test_a_connection_that_asks_nothing_is_closed_without_a_word(deploy, parts):
    deployment = await deploy(head_timeout_s=0.3)
    async with connection(deployment) as (reader, writer):
        sending = asyncio.create_task(trickle(writer, parts))
        assert await all_of(reader) == b""
        sending.cancel()


@pytest.mark.parametrize("size", [30, 10_000])
async def test_a_body_in_small_pieces_is_408(deploy, size):
    deployment = await deploy(body_timeout_s=0.3, body_min_bytes_per_s=100_000)
    async with connection(deployment) as (reader, writer):
        parts = [post(length=10_000_000), b"x" * size, *single(b" " * 2000)]
        assert error_of(await refused(reader, writer, parts)) == (408, "request_timeout")
    assert (await deployment.chat()).status_code == 200
    assert await deployment.metric("request_errors_total", error_type="request_timeout") == 1


async def test_a_body_that_is_fast_enough_may_take_longer_than_the_timeout(deploy):
    deployment = await deploy(body_timeout_s=0.5, body_min_bytes_per_s=50)
    body = CHAT[:-1] + b" " * 200 + b"}"
    began = time.monotonic()
    async with connection(deployment) as (reader, writer):
        pieces = [body[i : i + 6] for i in range(0, len(body), 6)]
        sending = asyncio.create_task(trickle(writer, [post(length=len(body)), *pieces], 0.03))
        assert b" 200 " in (await reader.readuntil(b"\r\n\r\n"))
        await sending
    assert time.monotonic() - began > 0.75


async def test_a_body_that_nobody_reads_does_not_hold_its_connection(deploy):
    deployment = await deploy(body_timeout_s=0.3)
    async with connection(deployment) as (reader, writer):
        answer = await refused(reader, writer, [post("/nowhere", 10_000_000), *single(b" " * 2000)])
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "parts", [[b"GET /v1/models HTT"], [], [b"\r\n"] * 20], ids=["head", "nothing", "ends"]
)
async def test_an_answer_may_last_and_is_not_written_into(deploy, parts):
    """Longer than both limits, while the next request's head is begun and not ended."""
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 80)))
    workers.step_s = 0.01
    deployment = await deploy(workers, head_timeout_s=0.2, body_timeout_s=0.2)
    body = CHAT[:-1] + b', "stream": true}'
    async with connection(deployment) as (reader, writer):
        writer.write(post(length=len(body)) + body)
        await trickle(writer, parts)
        answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.count(b'"content":"x"') == 80
        assert answer.count(b"HTTP/1.1") == 1
        if parts == [b"GET /v1/models HTT"]:
            writer.write(b"P/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_what_is_no_http_ends_a_stream_without_a_word_in_it(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 400)))
    workers.step_s = 0.01
    deployment = await deploy(workers)
    body = CHAT[:-1] + b', "stream": true}'
    async with connection(deployment) as (reader, writer):
        writer.write(post(length=len(body)) + body)
        await reader.readuntil(b'"content":"x"')
        writer.write(b"\x16\x03\x01")
        rest = await reader.read()
        assert b"HTTP/1.1" not in rest
        assert b"[DONE]" not in rest
    await until(lambda: not deployment.server.open_requests)


@pytest.mark.parametrize("piece", [100, 10_000, 10_000_000])
async def test_a_head_that_never_ends_is_431(deploy, piece):
    deployment = await deploy()
    head = GET[:-4] + b"a" * 200_000 + (b"\r\n\r\n" if piece > 200_000 else b"")
    pieces = [head[i : i + piece] for i in range(0, len(head), piece)]
    async with connection(deployment) as (reader, writer):
        sending = asyncio.create_task(trickle(writer, pieces, 0))
        assert error_of(await reader.read()) == (431, "head_too_large")
        sending.cancel()


async def test_an_answered_body_that_ends_late_does_not_hold_its_connection(deploy):
    deployment = await deploy(head_timeout_s=0.3, body_timeout_s=0.3)
    async with connection(deployment) as (reader, writer):
        writer.write(post("/nowhere", 2))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"{}")
        await reader.read()  # until the server closes


async def test_a_request_behind_a_stream_that_is_no_http_is_not_answered_in_it(deploy):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 80)))
    workers.step_s = 0.01
    deployment = await deploy(workers)
    body = CHAT[:-1] + b', "stream": true}'
    chunked = post().replace(b"content-length: %d" % len(CHAT), b"transfer-encoding: chunked")
    async with connection(deployment) as (reader, writer):
        writer.write(post(length=len(body)) + body)
        await reader.readuntil(b'"content":"x"')
        writer.write(chunked + b"no size\r\n")
        assert b"HTTP/1.1" not in await reader.read()


async def test_a_target_that_is_no_url_is_400(deploy):
    deployment = await deploy()
    async with connection(deployment) as (reader, writer):
        writer.write(b"OPTIONS http:// HTTP/1.1\r\nhost: x\r\n\r\n")
        assert error_of(await reader.read()) == (400, "invalid_http")


@pytest.mark.parametrize("trailer", [b"x-a: 1\r\n" * 100, b"a" * 1000], ids=["many", "long"])
async def test_trailers_are_bounded_as_heads_are(deploy, trailer):
    deployment = await deploy()
    chunked = post().replace(b"content-length: %d" % len(CHAT), b"transfer-encoding: chunked")
    async with connection(deployment) as (reader, writer):
        parts = [chunked + b"1\r\n{\r\n0\r\nx-b: ", *[trailer] * 1000]
        assert error_of(await refused(reader, writer, parts)) == (431, "head_too_large")


@pytest.mark.parametrize("pipelined", [0, 1])
async def test_an_answer_that_nobody_reads_does_not_hold_its_connection(deploy, until, pipelined):
    deployment = await deploy(model=ROOMY, body_timeout_s=0.3)
    body = json.dumps({"prompt": "x" * 6_000_000}).encode()
    async with connection(deployment) as (_, writer):
        connections = deployment.server._server.server_state.connections
        await until(lambda: connections)
        writer.transport.pause_reading()
        writer.write(post("/tokenize", len(body)) + body + GET * pipelined)
        await until(lambda: not connections)
    assert (await deployment.chat()).status_code == 200


async def test_a_stream_behind_an_answer_is_not_bounded_by_it(deploy):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 400)))
    workers.step_s = 0.01
    deployment = await deploy(workers, body_timeout_s=7.0)

    def limit_ms() -> int:
        (protocol,) = deployment.server._server.server_state.connections
        connection = protocol.transport.get_extra_info("socket")
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    body = CHAT[:-1] + b', "stream": true}'
    async with connection(deployment) as (reader, writer):
        writer.write(post("/nowhere", 2) + b"{}")
        await reader.readuntil(b"\r\n\r\n")
        assert limit_ms() == 7000
        writer.write(post(length=len(body)) + body)
        await reader.readuntil(b'"content":"x"')
        assert limit_ms() == 0


async def read_slowly(deployment) -> tuple[bool, float, float]:
    """(whether an answer came to its end, how long it was read, the longest pause between two reads)."""
    body = json.dumps({"prompt": "x" * 3_000_000}).encode()
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    try:
        writer.write(post("/tokenize", len(body)) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        left, reads = int(length.split(b":")[1]), [time.monotonic()]
        with suppress(ConnectionError):
            while left and (part := await reader.read(600_000)):
                left -= len(part)
                reads.append(time.monotonic())
                await asyncio.sleep(0.05)
        reads.append(time.monotonic())
    finally:
        writer.close()
    return not left, reads[-1] - reads[0], max(after - before for before, after in pairwise(reads))


async def test_an_answer_that_is_read_slowly_is_read_to_its_end(deploy):
    limit_s = 0.4
    deployment = await deploy(model=ROOMY, body_timeout_s=limit_s)
    for _ in range(20):
        whole, took_s, longest_pause_s = await read_slowly(deployment)
        if whole:
            break
        # The kernel's clock is everybody's: it rightly cuts off who was not let run for so long.
        assert longest_pause_s > limit_s / 2, "cut off though it read on"
    assert whole
    assert took_s > 1.5 * limit_s
