"""Clients that leave, that do not read, and that are too many."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from antiphon.protocol.messages import AbortRequest
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.http_connection import MAX_WAITING_REQUESTS
from antiphon.router.served_model import ServedModel

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def slow_workers(text: str = "x" * 3000) -> ScriptedGateway:
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, text)))
    workers.step_s = 0.01
    return workers


def aborts(workers: ScriptedGateway, worker_id: str) -> list[AbortRequest]:
    return [m for m in workers.workers[worker_id].sent if isinstance(m, AbortRequest)]


async def read_to_the_end(client: socket.socket) -> None:
    while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), 60):
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_while_decoding_aborts(deploy, until, stream):
    workers = slow_workers()
    deployment = await deploy(workers)
    request = asyncio.create_task(deployment.chat(stream=stream))
    await until(lambda: workers.workers["d0"].batches > 3)
    request.cancel()
    await until(lambda: aborts(workers, "d0"))
    assert not workers.workers["d0"].requests
    await until(lambda: not deployment.server.open_requests)
    assert await deployment.metric("client_disconnects_total", stage="decoding") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_while_prefilling_aborts_both_legs(deploy, until, stream):
    workers = slow_workers()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers)
    request = asyncio.create_task(deployment.chat(stream=stream))
    await until(lambda: workers.workers["p0"].held)
    request.cancel()
    await until(lambda: aborts(workers, "p0") and aborts(workers, "d0"))
    assert not workers.workers["p0"].held
    assert await deployment.metric("client_disconnects_total", stage="prefilling") == 1


async def test_disconnect_in_the_queue_reaches_no_worker(deploy, until):
    workers = slow_workers()
    deployment = await deploy(workers, max_in_flight_requests=1, max_queued_requests=1)
    first = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].requests)
    second = asyncio.create_task(deployment.chat())
    await until(lambda: deployment.server.open_requests == 2)
    second.cancel()
    await until(lambda: deployment.server.open_requests == 1)
    assert await deployment.metric("client_disconnects_total", stage="queued") == 1
    first.cancel()
    await until(lambda: not deployment.server.open_requests)
    assert len(workers.workers["d0"].sent) == 2  # one request and its abort


async def test_queue_is_bounded_and_first_come_first_served(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "ok")))
    workers.workers["d0"].hold = True
    deployment = await deploy(workers, max_in_flight_requests=2, max_queued_requests=1)
    running = [asyncio.create_task(deployment.chat()) for _ in range(2)]
    await until(lambda: len(workers.workers["d0"].held) == 2)
    waiting = asyncio.create_task(deployment.chat())
    await until(lambda: deployment.server.open_requests == 3)
    assert await deployment.metric("requests_queued") == 1
    refused = await deployment.chat()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert await deployment.metric("rejections_total", reason="queue_full") == 1
    workers.go_on("d0")
    answers = await asyncio.gather(*running, waiting)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert deployment.server.open_requests == 0


async def test_deadline_in_the_queue(deploy, until, pass_time):
    workers = slow_workers()
    workers.workers["d0"].hold = True
    deployment = await deploy(workers, max_in_flight_requests=1)
    first = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].held)
    second = asyncio.create_task(deployment.chat(timeout_s=30.0))
    await until(lambda: deployment.server.open_requests == 2)
    pass_time(30.0)
    assert (await second).status_code == 504
    first.cancel()


async def test_client_that_does_not_read_is_cut_off(deploy, until, caplog):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 400_000)))
    workers.tokens_per_step = 50
    long = ServedModel("tiny", max_context_tokens=500_000, created=0, fingerprint="fp")
    deployment = await deploy(workers, long, slow_client_buffer_tokens=64)
    url = httpx.URL(deployment.server.url)
    body = json.dumps({**BODY, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (url.host, url.port))
    try:
        await loop.sock_sendall(client, head.encode() + body)
        await until(lambda: aborts(workers, "d0"))
        await until(lambda: not deployment.server.open_requests)
        assert aborts(workers, "d0")[0].reason == "slow_client"
        assert await deployment.metric("slow_clients_total") == 1
        # Cut off means that the connection is gone, not that it waits to be read.
        with pytest.raises(ConnectionError):
            await read_to_the_end(client)
    finally:
        client.close()
    assert (await deployment.http.get("/health")).status_code == 200
    assert not caplog.records


async def test_client_that_leaves_while_it_sends(deploy, until):
    deployment = await deploy()
    url = httpx.URL(deployment.server.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    # What was not read when a connection breaks is never read.
    connections = deployment.server._server.server_state.connections
    await until(lambda: any(connection.cycle is not None for connection in connections))
    writer.transport.abort()
    metrics = deployment.server._context.metrics
    left = metrics.requests.labels("/v1/chat/completions", "499")
    await until(lambda: left._value.get() == 1)
    assert await deployment.metric("request_errors_total", error_type="server_error") == 0


@pytest.mark.parametrize("waiting", [1, 3, MAX_WAITING_REQUESTS, 4 * MAX_WAITING_REQUESTS])
async def test_client_that_leaves_with_requests_sent_ahead(deploy, until, waiting):
    """Beyond a number of them the connection is not read, and what tells is that nobody takes the answer."""
    workers = slow_workers()
    unread = waiting > MAX_WAITING_REQUESTS
    workers.workers["d0"].hold = not unread
    deployment = await deploy(workers)
    url = httpx.URL(deployment.server.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = json.dumps({**BODY, "stream": True}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    writer.write(request)
    await until(lambda: workers.workers["d0"].requests or workers.workers["d0"].held)
    writer.write(request * waiting)
    connections = deployment.server._server.server_state.connections
    await until(lambda: any(len(connection.pipeline) == waiting for connection in connections))
    if unread:
        await until(lambda: workers.workers["d0"].batches > 3)
    writer.transport.abort()
    await until(lambda: aborts(workers, "d0"))
    assert aborts(workers, "d0")[0].reason == "client_gone"
    await until(lambda: not deployment.server.open_requests)
    # None of those behind it has begun.
    assert len(workers.workers["d0"].sent) == 2  # one request and its abort
    assert await deployment.metric("requests_total", endpoint="/v1/chat/completions") == 1
    assert await deployment.metric("request_errors_total") == 0


async def test_streams_do_not_wait_for_each_other(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "abc")))
    deployment = await deploy(workers)
    responses = await asyncio.gather(*(deployment.chat(stream=True) for _ in range(40)))
    assert all(response.text.endswith("data: [DONE]\n\n") for response in responses)
    assert not deployment.server.open_requests
