"""The store of responses in Redis, against a real server that each test starts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from antiphon.configs.front_end import ResponseStoreConfig
from antiphon.protocol.errors import ConfigError
from antiphon.router.byte_format import CONTENT, REASONING, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.openai import redis_response_store
from antiphon.router.openai.errors import ApiError
from antiphon.router.openai.redis_response_store import PASSWORD_VARIABLE, RedisResponseStore
from antiphon.router.openai.response_store import StoredResponse
from antiphon.router.server import open_store

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")


class RedisServer:
    """A server on a socket of its own, without persistence."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.ping()
                except redis.AuthenticationError:
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, f"no server at {self.socket} within a minute"
                    time.sleep(0.02)
                else:
                    return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def keys(self) -> set[str]:
        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            return set(client.keys())

    def total(self) -> int:
        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            sizes = sum(map(int, client.hvals("{antiphon}:sizes")))
            assert int(client.get("{antiphon}:total") or 0) == sizes
            assert client.zcard("{antiphon}:ages") == client.hlen("{antiphon}:sizes")
            return sizes


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that the machine does not let run is not out of reach."""
    monkeypatch.setattr(redis_response_store, "TIMEOUT_S", 60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def store(server):
    store = await RedisResponseStore.connect(server.url, max_bytes=5000, max_age_s=60)
    yield store
    await store.close()


def stored(name: str, size: int = 10, history: list | None = None) -> StoredResponse:
    output = [{"type": "message", "id": f"msg_{name}", "text": "é" * size}]
    return StoredResponse({"id": f"resp_{name}", "output": output}, history or [], [{"role": "user"}])


async def test_what_is_put_comes_back(store):
    await store.put(stored("a", history=[{"h": 1}]))
    assert await store.get("resp_a") == stored("a", history=[{"h": 1}])
    assert (await store.item("msg_a"))["text"] == "é" * 10
    assert await store.get("resp_b") is None
    assert await store.item("msg_b") is None


async def test_deleting_leaves_nothing(store, server):
    await store.put(stored("a"))
    await store.put(stored("a", size=20))  # again: it replaces
    assert (await store.item("msg_a"))["text"] == "é" * 20
    assert await store.delete("resp_a")
    assert await store.get("resp_a") is None
    assert await store.item("msg_a") is None
    assert not await store.delete("resp_a")
    assert server.total() == 0
    assert server.keys() <= {"{antiphon}:total"}


async def test_age_ends_a_response(server):
    store = await RedisResponseStore.connect(server.url, max_bytes=5000, max_age_s=0.05)
    await store.put(stored("a"))
    assert server.total() == size_of(stored("a"))
    async with asyncio.timeout(60):
        while await store.get("resp_a") or await store.item("msg_a"):  # noqa: ASYNC110  (nobody tells)
            await asyncio.sleep(0.01)
    # What it counted for goes with the next one that is put.
    await store.put(stored("b"))
    assert server.total() == size_of(stored("b"))
    await store.close()


def size_of(response: StoredResponse) -> int:
    return sum(
        len(orjson.dumps(part)) for part in (response.response, response.history, response.input_items)
    )


async def test_size_drops_the_oldest_but_never_the_newest(store, server):
    for name in "abcd":
        await store.put(stored(name, size=750))
        await asyncio.sleep(0.003)  # ages are milliseconds
    assert [name for name in "abcd" if await store.get(f"resp_{name}")] == ["b", "c", "d"]
    assert await store.item("msg_a") is None
    assert server.total() <= 5000
    await store.put(stored("huge", size=4500))
    assert [name for name in ("b", "c", "d", "huge") if await store.get(f"resp_{name}")] == ["huge"]
    assert await store.item("msg_d") is None
    assert await store.item("msg_huge")


async def test_many_writers_keep_the_books(server):
    stores = [await RedisResponseStore.connect(server.url, max_bytes=20_000, max_age_s=60) for _ in range(4)]
    await asyncio.gather(
        *(stores[i % 4].put(stored(f"{i}", size=100 + i)) for i in range(120)),
        *(stores[i % 3].delete(f"resp_{i}") for i in range(0, 120, 3)),
    )
    assert 10_000 < server.total() <= 20_000
    for client in stores:
        await client.close()


def router_section(server: RedisServer) -> dict[str, object]:
    return {"response_store": {"redis_url": server.url}}


def answering() -> ScriptedGateway:
    return ScriptedGateway(lambda _: byte_answer((REASONING, "r"), (CONTENT, "one")))


async def test_routers_share_it(deploy, server):
    first = await deploy(answering(), **router_section(server))
    second = await deploy(answering(), **router_section(server))
    created = (await first.http.post("/v1/responses", json={"model": "tiny", "input": "A"})).json()
    read = await second.http.get(f"/v1/responses/{created['id']}")
    assert read.json() == created
    body = {"model": "tiny", "previous_response_id": created["id"], "input": "B", "stream": True}
    streamed = (await second.http.post("/v1/responses", json=body)).text
    assert "event: response.completed" in streamed
    prompt = bytes(second.workers.workers["d0"].sent[-1].prompt_token_ids).decode()
    assert prompt == "user: A\nassistant: one\nuser: B\nassistant: "
    reference = [{"type": "item_reference", "id": created["output"][1]["id"]}]
    body = {"model": "tiny", "input": [{"role": "user", "content": "A"}, *reference]}
    assert (await second.http.post("/v1/responses", json=body)).status_code == 200
    assert (await second.http.delete(f"/v1/responses/{created['id']}")).status_code == 200
    assert (await first.http.get(f"/v1/responses/{created['id']}")).status_code == 404


async def test_a_server_that_goes_and_comes_back(deploy, server):
    deployment = await deploy(answering(), **router_section(server))
    body = {"model": "tiny", "input": "A"}
    assert (await deployment.http.post("/v1/responses", json=body)).status_code == 200
    server.stop()
    refused = await deployment.http.post("/v1/responses", json=body)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "store" in refused.json()["error"]["message"]
    streamed = (await deployment.http.post("/v1/responses", json={**body, "stream": True})).text
    kinds = [line[7:] for line in streamed.splitlines() if line.startswith("event: ")]
    assert kinds[-1] == "response.failed"
    assert "response.completed" not in kinds
    numbers = [part.split(",")[0] for part in streamed.split('"sequence_number":')[1:]]
    assert numbers == [str(i) for i in range(len(kinds))]
    # Who wants nothing kept does not notice.
    assert (await deployment.http.post("/v1/responses", json={**body, "store": False})).status_code == 200
    assert (await deployment.chat()).status_code == 200
    assert not deployment.server.open_requests
    server.start()
    assert (await deployment.http.post("/v1/responses", json=body)).status_code == 200


async def test_a_password_comes_from_the_environment(server, monkeypatch):
    server.stop()
    server.start("--requirepass", "open sesame")
    config = ResponseStoreConfig(redis_url=server.url)
    with pytest.raises(ConfigError, match=r"redis_url unix://.*authenticate"):
        await open_store(config)
    monkeypatch.setenv(PASSWORD_VARIABLE, "open sesame")
    store = await open_store(config)
    await store.put(stored("a"))
    assert await store.get("resp_a")
    await store.close()


async def test_no_server_is_one_clear_error(server, deploy):
    server.stop()
    with pytest.raises(ConfigError, match=r"router\.response_store\.redis_url unix://"):
        await deploy(**router_section(server))


async def test_out_of_reach_is_said(server):
    store = await RedisResponseStore.connect(server.url, max_bytes=5000, max_age_s=60)
    server.stop()
    for call in (store.get("resp_a"), store.item("msg_a"), store.delete("resp_a"), store.put(stored("a"))):
        with pytest.raises(ApiError) as caught:
            await call
        assert caught.value.status == 503
    await store.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"redis_url": "http://host"}, "scheme"),
        ({"redis_url": "redis://:secret@host"}, "password"),
        ({"redis_url": "redis://host", "path": "x.sqlite"}, "two stores"),
    ],
)
def test_settings_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        ResponseStoreConfig(**fields)


async def test_a_silent_server_does_not_hold_the_client(deploy, server):
    """A Redis that accepts and never answers is out of reach after a bounded time."""
    deployment = await deploy(answering(), **router_section(server))
    connections = deployment.server._context.store._client.connection_pool
    assert connections.connection_kwargs["socket_timeout"] == redis_response_store.TIMEOUT_S
    connections.connection_kwargs["socket_timeout"] = 0.3
    await connections.disconnect()
    connections.reset()
    server.stop()
    server.socket.unlink(missing_ok=True)

    async def take_and_say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(take_and_say_nothing, str(server.socket))
    async with silent:
        response = await deployment.http.post("/v1/responses", json={"model": "tiny", "input": "A"})
        assert response.status_code == 503
