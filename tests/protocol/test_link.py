"""Links: greeting, tokens, order across cut connections, leases, bounds, threads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from antiphon.protocol import link, link_wire
from antiphon.protocol.codec import AnyMessage
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import PROTOCOL_VERSION, Role, WorkerAddress
from antiphon.protocol.link import LinkNode, LinkSettings, Peer
from antiphon.protocol.messages import AbortRequest, TokensAck

TOKEN = "a cluster token for tests"
QUICK = LinkSettings(
    heartbeat_s=0.05, lease_s=120.0, greeting_timeout_s=0.4, first_backoff_s=0.01, max_backoff_s=0.05
)
"""Dials again at once; a lease outlasts any pause of this process, so that only what a test does ends one."""
SHORT_LEASE_S = 0.6


class Recorder:
    """Keeps what a node's handler was told."""

    def __init__(self) -> None:
        self.up: list[Peer] = []
        self.lost: list[tuple[Peer, str]] = []
        self.messages: list[tuple[Peer, AnyMessage]] = []

    def on_up(self, peer: Peer) -> None:
        self.up.append(peer)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.messages.append((peer, message))

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.lost.append((peer, reason))

    def numbers(self) -> list[int]:
        return [m.sequence_number for _, m in self.messages if isinstance(m, TokensAck)]


class End:
    """A node and its recorder."""

    def __init__(
        self, role: Role, token: str = TOKEN, epoch: int = 1, settings: LinkSettings = QUICK
    ) -> None:
        self.saw = Recorder()
        self.peer = Peer(role, f"{role}-0", epoch)
        self.node = LinkNode(self.peer, token, self.saw, settings)
        self.node.start()

    def listen(self) -> WorkerAddress:
        endpoint = self.node.listen("127.0.0.1")
        return WorkerAddress(self.peer.worker_id, self.peer.role, self.peer.epoch, endpoint)


@asynccontextmanager
async def ends(*made: End) -> AsyncIterator[None]:
    try:
        yield
    except AssertionError as error:
        for end in made:
            saw = end.saw
            error.add_note(f"{end.peer}: up {saw.up}, lost {saw.lost}, {len(saw.messages)} messages")
        raise
    finally:
        for end in made:
            end.node.close()


async def until(condition: Callable[[], bool]) -> None:
    """Poll until true; fails the test otherwise."""
    deadline = time.monotonic() + 60
    while not condition():  # another thread's or socket's state
        assert time.monotonic() < deadline, "it did not come within 60 s"
        await asyncio.sleep(0.005)


class CuttableProxy:
    """Forwards TCP and can cut every connection or stop forwarding."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    def hush(self) -> None:
        """Keep the connections and forward nothing."""
        self._open.clear()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(4096):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_messages_cross_both_ways_in_order() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: bool(router.saw.up and decode.saw.up))
        for number in range(1, 501):
            assert router.node.send(peer, TokensAck(number))
            assert decode.node.send(router.peer, TokensAck(number))
        await until(lambda: len(router.saw.messages) == len(decode.saw.messages) == 500)
        assert router.saw.numbers() == decode.saw.numbers() == list(range(1, 501))
        assert not router.saw.lost
        assert router.node.detail(peer) == ""


async def test_nothing_is_lost_or_repeated_when_connections_are_cut() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    address = decode.listen()
    proxy = CuttableProxy(address.endpoint)
    through = WorkerAddress(address.worker_id, address.role, address.epoch, await proxy.start())
    async with ends(decode, router):
        peer = router.node.connect(through)
        await until(lambda: bool(router.saw.up and decode.saw.up))
        for number in range(1, 2001):
            assert router.node.send(peer, TokensAck(number))
            assert decode.node.send(router.peer, TokensAck(number))
            if number % 400 == 0:
                proxy.cut()
            if number % 50 == 0:
                await asyncio.sleep(0.005)
        await until(lambda: len(router.saw.messages) >= 2000 and len(decode.saw.messages) >= 2000)
        assert router.saw.numbers() == decode.saw.numbers() == list(range(1, 2001))
        assert not router.saw.lost
        assert not decode.saw.lost
        assert len(router.saw.up) == len(decode.saw.up) == 1
        assert router.node.counters["sessions_resumed"] > 0
    await proxy.stop()


async def test_a_silent_peer_loses_its_lease_on_both_sides_and_comes_back_fresh() -> None:
    short = replace(QUICK, lease_s=SHORT_LEASE_S)
    decode, router = End(Role.DECODE, settings=short), End(Role.ROUTER, settings=short)
    address = decode.listen()
    proxy = CuttableProxy(address.endpoint)
    through = WorkerAddress(address.worker_id, address.role, address.epoch, await proxy.start())
    async with ends(decode, router):
        peer = router.node.connect(through)
        await until(lambda: bool(router.saw.up and decode.saw.up))
        proxy.hush()
        await until(lambda: bool(router.saw.lost and decode.saw.lost))
        assert not router.node.send(peer, TokensAck(1))
        assert decode.saw.lost[0] == (router.peer, f"silent for {SHORT_LEASE_S:g} s")
        ups = len(router.saw.up)
        proxy._open.set()
        proxy.cut()
        await until(lambda: len(router.saw.up) > ups and router.node.is_up(peer))
        assert router.node.send(peer, TokensAck(7))
        await until(lambda: 7 in decode.saw.numbers())
    await proxy.stop()


async def test_another_token_is_refused() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER, token="some other cluster's token")
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: "token" in router.node.detail(peer))
        assert not router.saw.up
        assert not decode.saw.up
        assert not router.node.send(peer, TokensAck(1))


async def test_greeting_without_proof_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a client that knows the keys of the encrypted channel must prove the token."""
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    monkeypatch.setattr(router.node._keys, "_proof", lambda *_: b"0" * 32)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: decode.node.counters["greetings_refused"] > 0)
        await until(lambda: "not made with this cluster's token" in router.node.detail(peer))
        assert not decode.saw.up


async def test_another_protocol_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    greet = router.node._keys.greet

    def old_greet(*arguments: object, **named: object) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(link_wire, "PROTOCOL_VERSION", 0)
            return greet(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(router.node._keys, "greet", old_greet)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        said = f"protocol version {PROTOCOL_VERSION} here, 0 at router-0"
        await until(lambda: said in router.node.detail(peer))
        assert not decode.saw.up


async def test_another_life_of_the_worker_is_not_believed() -> None:
    decode, router = End(Role.DECODE, epoch=5), End(Role.ROUTER)
    async with ends(decode, router):
        address = decode.listen()
        peer = router.node.connect(WorkerAddress(address.worker_id, address.role, 4, address.endpoint))
        await until(lambda: "expected decode decode-0 (epoch 4)" in router.node.detail(peer))
        assert not router.saw.up


async def test_a_late_listener_is_found() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    with (
        socket.socket() as reserved
    ):  # nobody else is given its port, and only one who names it may listen there
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        async with ends(decode, router):
            address = WorkerAddress("decode-0", Role.DECODE, 1, f"tcp://127.0.0.1:{port}")
            peer = router.node.connect(address)
            await until(lambda: router.node.detail(peer) == "connection refused")
            decode.node.listen("127.0.0.1", port)
            await until(lambda: router.node.is_up(peer))


async def test_farewell_is_noticed_long_before_a_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FAREWELL_LINGER_MS", 60_000)  # else a machine at its limit loses it
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: bool(router.saw.up and decode.saw.up))
        router.node.send(peer, AbortRequest("r", 1, "client left"))
        router.node.disconnect(peer, "removed from the topology")
        await until(lambda: bool(decode.saw.lost))
        assert [type(m) for _, m in decode.saw.messages] == [AbortRequest]
        assert decode.saw.lost == [(router.peer, "peer said: removed from the topology")]


async def test_a_peer_that_does_not_keep_up_is_lost() -> None:
    settings = LinkSettings(heartbeat_s=5, lease_s=120, max_unacknowledged=100)
    decode, router = End(Role.DECODE, settings=settings), End(Role.ROUTER, settings=settings)
    address = decode.listen()
    proxy = CuttableProxy(address.endpoint)
    through = WorkerAddress(address.worker_id, address.role, address.epoch, await proxy.start())
    async with ends(decode, router):
        peer = router.node.connect(through)
        await until(lambda: bool(router.saw.up and decode.saw.up))
        proxy.hush()
        sent = [router.node.send(peer, TokensAck(number)) for number in range(200)]
        assert sent.count(True) == 101
        await until(lambda: bool(router.saw.lost))
        assert "does not keep up: 100 messages" in router.saw.lost[0][1]
    await proxy.stop()


async def test_a_peer_that_takes_much_at_once_says_so_before_its_next_heartbeat() -> None:
    """A burst of long prompts would otherwise end the link to a worker that keeps up with them."""
    settings = LinkSettings(heartbeat_s=120, lease_s=600, max_unacknowledged_bytes=4 * 2**20)
    decode, router = End(Role.DECODE, settings=settings), End(Role.ROUTER, settings=settings)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: bool(router.saw.up and decode.saw.up))
        for number in range(12):
            assert router.node.send(peer, AbortRequest("r", number, "x" * 2**20))
            await until(lambda count=number + 1: len(decode.saw.messages) == count)
            await until(lambda: router.node.backlog_bytes(peer) == 0)
        assert not router.saw.lost


async def test_send_from_other_threads() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: bool(router.saw.up))

        def send(name: int) -> None:
            for number in range(300):
                router.node.send(peer, AbortRequest(str(name), number, ""))

        threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        await until(lambda: len(decode.saw.messages) == 900)
        for thread in threads:
            thread.join()
        for name in range(3):
            attempts = [
                m.attempt
                for _, m in decode.saw.messages
                if isinstance(m, AbortRequest) and m.request_id == str(name)
            ]
            assert attempts == list(range(300))


async def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="5 characters"):
        End(Role.ROUTER, token="short")
    end = End(Role.DECODE)
    async with ends(end):
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
            end.node.listen("0.0.0.0")
        other = End(Role.DECODE)
        async with ends(other):
            port = int(end.listen().endpoint.rsplit(":", 1)[1])
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
                other.node.listen("127.0.0.1", port)


async def test_a_session_that_only_one_side_remembers_ends_long_before_its_lease() -> None:
    decode, router = End(Role.DECODE), End(Role.ROUTER)
    async with ends(decode, router):
        peer = router.node.connect(decode.listen())
        await until(lambda: bool(router.saw.up and decode.saw.up))
        decode.node._lose(decode.node._conversations[router.peer], "forgotten")
        router.node.send(peer, TokensAck(1))
        await until(lambda: bool(router.saw.lost))
        assert router.saw.lost[0] == (peer, "peer said: the session is over here")
        await until(lambda: len(decode.saw.up) == len(router.saw.up) == 2)
        assert router.node.send(peer, TokensAck(2))
        await until(lambda: decode.saw.numbers() == [2])
