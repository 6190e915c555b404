"""The router over real links: encrypted, to workers that listen on loopback."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol import link
from antiphon.protocol.identity import Role, Topology, WorkerAddress, new_epoch
from antiphon.protocol.link import LinkNode, LinkSettings
from antiphon.protocol.link_wire import Peer
from antiphon.protocol.messages import (
    AbortRequest,
    Finish,
    FinishReason,
    GenerateRequest,
    KvTicket,
    LoadReport,
    PrefillFinished,
    PrefillRequest,
    Reserved,
    SamplingParams,
    TokenBatch,
    TokenOutput,
    TokensAck,
)
from antiphon.router.byte_format import CONTENT, ByteFormatter, byte_answer
from antiphon.router.dispatch import link_gateway
from antiphon.router.dispatch.gateway import WorkerBacklogged, WorkerUnreachable
from antiphon.router.dispatch.link_gateway import LinkGateway
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer

TOKEN = "a cluster token of good length"
SETTINGS = LinkSettings(heartbeat_s=5.0, lease_s=120.0)
"""Who ends says so: no lease has to run out, and none does while a machine has no time for anybody."""


class ListeningWorker:
    """A worker that answers every request with ``hello``, over a link of its own."""

    def __init__(self, worker_id: str, role: Role, decode: ListeningWorker | None = None) -> None:
        self.me = Peer(role, worker_id, new_epoch())
        self.decode = decode
        self.acknowledged = 0
        self.sent = 0
        self.silent = False
        self.router: Peer | None = None
        self.node = LinkNode(self.me, TOKEN, self, SETTINGS)
        self.node.start()
        self.endpoint = self.node.listen("127.0.0.1")

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.me.worker_id, self.me.role, self.me.epoch, self.endpoint)

    def on_up(self, peer: Peer) -> None:
        self.router, self.sent = peer, 0
        peers = {self.decode.me.worker_id: self.decode.me.epoch} if self.decode else {}
        self.node.send(peer, LoadReport(self.me.epoch, 0, 0, 90, 100, 0, kv_peers=peers))

    def on_message(self, peer: Peer, message: object) -> None:
        match message:
            case GenerateRequest():
                self.request = message
                kv_tokens = len(message.prompt_token_ids) + len(message.output_token_ids) - 1
                key = self.me.worker_id, self.me.epoch, message.request_id, message.attempt
                ticket = KvTicket(*key, kv_tokens, 0, [], [], 0)
                self.node.send(peer, Reserved(message.request_id, message.attempt, 0, ticket, 0.0))
            case PrefillRequest():
                self.node.send(
                    peer, PrefillFinished(message.request_id, message.attempt, 0, 0.0, 0.0, 0.0, 0)
                )
                self.decode.answer(message)
            case TokensAck():
                self.acknowledged = message.sequence_number

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.router = None

    def end(self) -> None:
        """Close the link, however long this machine takes to get the farewell out."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "FAREWELL_LINGER_MS", 60_000)
            self.node.close()

    def answer(self, message: PrefillRequest) -> None:
        tokens = byte_answer((CONTENT, "hello"))
        for i, token in enumerate(tokens[:3] if self.silent else tokens):
            finish = Finish(FinishReason.STOP) if i == len(tokens) - 1 else None
            output = TokenOutput(message.request_id, message.attempt, i, [token], None, finish)
            self.sent += 1
            self.node.send(self.router, TokenBatch(self.me.epoch, self.sent, [output]))


@pytest.fixture
async def parts():
    decode = ListeningWorker("d0", Role.DECODE)
    prefill = ListeningWorker("p0", Role.PREFILL, decode)
    config = DeploymentConfig.model_validate({"model": {"path": "tiny"}, "router": {"port": 0}})
    gateway = LinkGateway("router-0", TOKEN, SETTINGS)
    server = RouterServer(config, ServedModel("tiny", 512, 0, "fp"), ByteFormatter(), gateway)
    await server.start()
    yield server, gateway, prefill, decode
    await server.stop(drain=False)
    prefill.node.close()
    decode.node.close()


async def chat(server: RouterServer) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{server.url}/v1/chat/completions", json=body)


async def test_a_request_over_links(parts, until):
    server, _, prefill, decode = parts
    assert (await chat(server)).status_code == 503
    server.set_topology(Topology(1, (prefill.address, decode.address)))
    await until(lambda: server.ready)
    response = await chat(server)
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    await until(lambda: decode.acknowledged == len("hello") + 2)


async def test_no_more_work_is_sent_to_a_worker_that_much_is_on_its_way_to(parts, until, monkeypatch):
    server, gateway, prefill, decode = parts
    server.set_topology(Topology(1, (prefill.address, decode.address)))
    await until(lambda: server.ready)
    monkeypatch.setattr(link_gateway, "MAX_BACKLOG_BYTES", 1000)
    sampling = SamplingParams(max_tokens=1, seed=0)
    work = GenerateRequest("r", 0, [7] * 2000, [], sampling, 0, 60.0)
    gateway.send("d0", work)  # one may be as large as it likes, and nothing has been read of it yet
    with pytest.raises(WorkerBacklogged, match=r"\d{4} bytes are still on their way to worker d0"):
        gateway.send("d0", work)
    gateway.send("d0", AbortRequest("r", 1, "test"))
    gateway.send("d0", GenerateRequest("again", 16, [7] * 2000, [7], sampling, 0, 60.0))
    gateway.send("p0", TokensAck(0))
    await until(lambda: gateway._node.backlog_bytes(decode.me) < 1000)
    assert (await chat(server)).json()["choices"][0]["message"]["content"] == "hello"


async def test_a_worker_that_dies_is_replaced_by_its_next_life(parts, until):
    server, _, prefill, decode = parts
    server.set_topology(Topology(1, (prefill.address, decode.address)))
    await until(lambda: server.ready)
    decode.silent = True
    answer = asyncio.create_task(chat(server))
    await until(lambda: decode.acknowledged == 3)
    decode.end()
    await until(lambda: not server.ready)
    assert not answer.done()
    successor = ListeningWorker("d0", Role.DECODE)
    try:
        prefill.decode = successor
        server.set_topology(Topology(2, (prefill.address, successor.address)))
        prefill.on_up(prefill.router)
        await until(lambda: server.ready)
        # The new life answers from the beginning; what was emitted before is neither lost nor repeated.
        response = await answer
        assert response.json()["choices"][0]["message"]["content"] == "hello"
        assert successor.request.output_token_ids == byte_answer((CONTENT, "hello"))[:3]
    finally:
        successor.node.close()


async def test_a_farewell_is_read_though_the_connection_has_ended_by_then(parts, until):
    server, _, prefill, decode = parts
    server.set_topology(Topology(1, (prefill.address, decode.address)))
    await until(lambda: server.ready)
    decode.end()
    time.sleep(0.1)  # noqa: ASYNC251  (nobody reads until both are there)
    began = time.monotonic()
    await until(lambda: not server.ready)
    assert time.monotonic() - began < SETTINGS.lease_s / 2


async def test_workers_that_leave_the_topology_are_dropped(parts, until):
    server, gateway, prefill, decode = parts
    server.set_topology(Topology(5, (prefill.address, decode.address)))
    await until(lambda: server.ready)
    server.set_topology(Topology(4, ()))
    await asyncio.sleep(0.05)
    assert server.ready, "an older topology is not believed"
    server.set_topology(Topology(6, (decode.address,)))
    await until(lambda: not server.ready)
    with pytest.raises(WorkerUnreachable, match="p0"):
        gateway.send("p0", TokensAck(1))
