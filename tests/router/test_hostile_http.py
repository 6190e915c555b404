"""What clients, probes and scanners send that is no proper request: an answer in one shape, soon."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import httpx
import pytest

from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.served_model import ServedModel

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST /v1/chat/completions HTTP/1.1", b"host: x", *headers, b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def exchange(deployment: Any, sent: bytes | list[bytes], answers: int = 1) -> list[tuple[int, bytes]]:
    """Statuses and bodies of the answers to raw bytes, or pieces of them, in the order in which they came."""
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    for piece in [sent] if isinstance(sent, bytes) else sent:
        writer.write(piece)
        await asyncio.sleep(0)
    got = []
    async with asyncio.timeout(60):
        for _ in range(answers):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status = int(head.split()[1])
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            if "content-length" in fields:
                body = await reader.readexactly(int(fields["content-length"]))
            else:
                body = await reader.readuntil(b"0\r\n\r\n")
            got.append((status, body))
    writer.close()
    return got


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"FOO /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        post(b"{}").replace(b"content-length: 2", b"content-length: two"),
        post(b"{}").replace(b"content-length: 2", b"content-length: -2"),
        post(b"5\r\nhello\r\nfive\r\nhello").replace(b"content-length: 21", b"transfer-encoding: chunked"),
    ],
)
async def test_what_is_no_http_gets_the_same_body(deploy, sent):
    ((status, body),) = await exchange(await deploy(), sent)
    assert status == 400
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_http"


async def test_pipelined_requests_are_answered_in_order(deploy):
    deployment = await deploy()
    stream = json.dumps(CHAT | {"stream": True}).encode()
    whole = json.dumps(CHAT).encode()
    got = await exchange(deployment, post(stream) + GET + post(b"{") + post(whole) + GET, 5)
    assert [status for status, _ in got] == [200, 200, 400, 200, 200]
    assert b"data: [DONE]" in got[0][1]
    assert json.loads(got[1][1])["object"] == json.loads(got[4][1])["object"] == "list"
    assert json.loads(got[3][1])["object"] == "chat.completion"


async def test_a_body_that_ends_early_leaves_nothing_behind(deploy, until):
    deployment = await deploy()
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(post(b"{}").replace(b"content-length: 2", b"content-length: 50"))
    writer.write_eof()
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: not deployment.server.open_requests)
    assert (await deployment.chat()).status_code == 200


async def test_a_body_that_stalls_is_given_up(deploy):
    deployment = await deploy(body_timeout_s=0.2)
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(post(b"{}").replace(b"content-length: 2", b"content-length: 50"))
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_timeout"
    assert (await deployment.chat()).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny"])
async def test_head_is_get_without_a_body(deploy, path):
    deployment = await deploy()
    head, get = await deployment.http.head(path), await deployment.http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(get.content))


async def test_other_methods_name_those_that_are_allowed(deploy):
    deployment = await deploy()
    for method, path, allow in (
        ("HEAD", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("PATCH", "/v1/responses/resp_x", "DELETE, GET, HEAD"),
    ):
        response = await deployment.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)


async def test_an_encoded_body_is_refused_by_its_header(deploy):
    deployment = await deploy()
    for encoding in ("gzip", "br"):
        response = await deployment.http.post(
            "/v1/chat/completions",
            content=gzip.compress(json.dumps(CHAT).encode()),
            headers={"content-encoding": encoding},
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_header"
    same = {"content-encoding": "identity"}
    assert (await deployment.http.post("/v1/chat/completions", json=CHAT, headers=same)).status_code == 200


@pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', b"5"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions", "/detokenize"])
async def test_a_body_that_is_no_object_is_told_so(deploy, path, body):
    response = await (await deploy()).http.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "The body must be a JSON object.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_type",
    }


@pytest.mark.parametrize("text", ["word " * 1_000_000, "a" * 5_000_000, "é€" * 1_000_000], ids=len)
async def test_a_hopeless_prompt_is_not_encoded_to_its_end(deploy, text):
    """Encoding five megabytes takes seconds, in which the router would do nothing else."""
    model = ServedModel(name="tiny", max_context_tokens=8192, created=1, fingerprint="fp")
    deployment = await deploy(model=model, formatter=HarmonyFormatter(), encoding_processes=0)
    encoded = 0
    encode = HarmonyFormatter.encode

    def counted(self: HarmonyFormatter, part: str) -> list[int]:
        nonlocal encoded
        encoded += len(part)
        return encode(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarmonyFormatter, "encode", counted)
        for path, fields in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", {"input": text}),
            ("/v1/completions", {"prompt": text}),
        ):
            encoded, began = 0, time.process_time()
            response = await deployment.http.post(path, json={"model": "tiny", **fields})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == next(iter(fields))
            assert "more than" in error["message"]
            assert 0 < encoded < 200_000
            assert time.process_time() - began < 10


async def test_reasoning_that_the_prompt_leaves_out_does_not_count(deploy):
    model = ServedModel(name="tiny", max_context_tokens=2048, created=1, fingerprint="fp")
    deployment = await deploy(model=model, formatter=HarmonyFormatter())
    old = {"role": "assistant", "content": "yes", "reasoning": "word " * 10_000}
    new = {"role": "assistant", "reasoning": "word " * 10_000, "tool_calls": [CALL]}
    turns = [{"role": "user", "content": "hi"}, old, {"role": "user", "content": "go on"}]
    body = {"model": "tiny", "max_completion_tokens": 8}
    response = await deployment.http.post("/v1/chat/completions", json={**body, "messages": turns})
    assert response.status_code == 200, response.text
    result = {"role": "tool", "tool_call_id": "a", "content": "5"}
    kept = {**body, "messages": [*turns, new, result]}
    response = await deployment.http.post("/v1/chat/completions", json=kept)
    assert response.json()["error"]["code"] == "context_length_exceeded"


OFFER = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAABAAMAAABk")
"""What Java's client puts before every first request to a server that it does not know."""


@pytest.mark.parametrize("pieces", [1, 3, 400])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(deploy, pieces):
    deployment = await deploy()
    sent = post(json.dumps(CHAT).encode(), *OFFER) + post(
        json.dumps(CHAT | {"stream": True}).encode(), *OFFER
    )
    size = -(-len(sent) // pieces)
    got = await exchange(deployment, [sent[i : i + size] for i in range(0, len(sent), size)], 2)
    assert [status for status, _ in got] == [200, 200]
    assert json.loads(got[0][1])["choices"][0]["message"]["content"] == "hello"
    assert b"data: [DONE]" in got[1][1]


async def test_an_offer_keeps_what_else_the_head_says(deploy):
    deployment = await deploy()
    body = json.dumps(CHAT).encode()
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    chunked += b"\r\n".join(OFFER) + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    socket = GET.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: websocket")
    closing = post(b"{", b"connection: close, upgrade", b"upgrade: h2c")
    got = await exchange(deployment, chunked + socket + closing, 3)
    assert [status for status, _ in got] == [200, 200, 400]
    broken = post(b"{}", *OFFER).replace(b"content-length: 2", b"content-length: two")
    assert (await exchange(deployment, broken))[0][0] == 400
    large = post(b"{}", b"x: " + b"y" * 70_000, *OFFER)
    assert (await exchange(deployment, large))[0][0] == 431


async def test_clients_of_http_1_0_get_no_chunks(deploy):
    deployment = await deploy()
    url = httpx.URL(deployment.server.url)
    for fields, end in (({"stream": True}, b"data: [DONE]\n\n"), ({}, b"}")):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(post(json.dumps(CHAT | fields).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        async with asyncio.timeout(60):
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        writer.close()
        assert head.split()[1] == b"200"
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert body.startswith((b"data: {", b"{"))
        assert body.endswith(end)
