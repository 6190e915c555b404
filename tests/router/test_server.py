"""Start and end of a router process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

from antiphon.protocol.errors import ConfigError
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.server import CLOSE_TIMEOUT_S, bind_socket


async def test_port_in_use_is_one_clear_error(deploy):
    deployment = await deploy()
    port = httpx.URL(deployment.server.url).port
    with pytest.raises(ConfigError, match=f"router.port {port}: the port is in use by another process"):
        await deploy(port=port)
    assert (await deployment.chat()).status_code == 200


def test_unknown_host_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"router\.host"):
        bind_socket("256.256.256.256", 8000)


async def test_drain_finishes_what_runs_and_takes_nothing_new(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 20)))
    workers.workers["d0"].hold = True
    deployment = await deploy(workers, drain_timeout_s=60)
    running = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].held)
    stopping = asyncio.create_task(deployment.server.stop())
    await asyncio.sleep(0)
    assert (await deployment.http.get("/ready")).status_code == 503
    assert (await deployment.http.get("/health")).status_code == 200
    late = await deployment.chat()
    assert late.status_code == 503
    assert late.headers["retry-after"]
    workers.go_on("d0")
    assert (await running).json()["choices"][0]["message"]["content"] == "x" * 20
    await stopping
    with pytest.raises(httpx.TransportError):
        await deployment.http.get("/health")


async def test_drain_is_bounded_and_says_so(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 400)))
    workers.step_s = 0.02
    deployment = await deploy(workers, drain_timeout_s=0.1)
    stream = asyncio.create_task(deployment.chat(stream=True))
    document = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 4)
    await deployment.server.stop()
    last = [line[6:] for line in (await stream).text.split("\n\n") if line][-1]
    assert json.loads(last)["error"]["code"] == "service_unavailable"
    assert (await document).status_code == 503
    assert not workers.workers["d0"].requests


async def test_the_notice_of_a_drain_is_part_of_its_time(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 400)))
    workers.step_s = 0.05  # far more in all than the drain may take
    deployment = await deploy(workers, drain_notice_s=0.8, drain_timeout_s=1.0)
    running = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches)
    now = asyncio.get_running_loop().time
    began = now()
    await deployment.server.stop()
    assert 0.9 < now() - began < 1.7
    assert (await running).status_code == 503


PROBE = """
import sys, time
started = time.process_time()
import antiphon.router.server, antiphon.router.dispatch.link_gateway
took = time.process_time() - started
heavy = {"torch", "ray", "nixl", "transformers", "numpy", "triton", "redis"} & set(sys.modules)
banned = [f"antiphon.{name}" for name in
          ("prefill_worker", "decode_worker", "engine", "model", "kernels", "kv_transfer", "cluster")]
workers = [m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in banned)]
print(took, sorted(heavy) + workers)
"""


def test_import_is_light_and_quick():
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=200
    )
    took, heavy = result.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    # Of the processor, which is the promise of 1.5 s on an idle machine; the margin is for a slow one.
    assert float(took) < 5, f"import took {took} s"


async def test_a_body_that_is_still_coming_does_not_hold_the_end(deploy):
    """A stop waits for answers, and this request has none to wait for yet."""
    deployment = await deploy()
    url = httpx.URL(deployment.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
    loop = asyncio.get_running_loop()
    # Its head has been read once an answer to a later request is there.
    assert (await deployment.chat()).status_code == 200
    began = loop.time()
    await deployment.server.stop()
    assert loop.time() - began < CLOSE_TIMEOUT_S / 2
    async with asyncio.timeout(60):
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
    writer.close()
    assert head.split()[1] == b"503"
    assert b"retry-after: " in head
    assert json.loads(body)["error"]["code"] == "service_unavailable"
