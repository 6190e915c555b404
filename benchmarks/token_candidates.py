"""Candidates for the token stream between a worker and a router: each as a producer and a consumer.

Every candidate carries the same bytes: one ``TokenBatch`` of 32 one-token outputs per step, encoded and
decoded by the wire codec.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
import zmq.utils.z85

from antiphon.protocol.codec import AnyMessage, decode, encode
from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.link import LinkNode, Peer
from antiphon.protocol.messages import TokenBatch, TokenOutput

TOKENS_PER_STEP = 32
GRPC_METHOD = "/antiphon.TokenStream/Tokens"


@dataclass(frozen=True, slots=True)
class Load:
    """How many messages to send, and how fast (0: as fast as they are taken)."""

    messages: int
    per_second: float


def step_message(sequence_number: int) -> TokenBatch:
    """One step's tokens; ``epoch`` carries the producer's clock in nanoseconds."""
    outputs = [
        TokenOutput(f"chatcmpl-{row:032x}", 1, sequence_number, [199_000 + row])
        for row in range(TOKENS_PER_STEP)
    ]
    return TokenBatch(time.monotonic_ns(), sequence_number, outputs)


async def paced(load: Load) -> AsyncIterator[TokenBatch]:
    """Messages of a load at their times."""
    start = time.monotonic()
    for number in range(1, load.messages + 1):
        if load.per_second:
            await asyncio.sleep(max(0.0, start + number / load.per_second - time.monotonic()))
        elif number % 64 == 0:
            await asyncio.sleep(0)
        yield step_message(number)


class Taken:
    """What a consumer saw."""

    def __init__(self) -> None:
        self.latencies_us: list[float] = []
        self.first = 0.0
        self.last = 0.0

    def take(self, data: bytes) -> None:
        """Decode one message and note its age."""
        self.take_message(decode(data))

    def take_message(self, batch: object) -> None:
        """Note one message's age."""
        if not isinstance(batch, TokenBatch):
            raise TypeError(f"expected a TokenBatch, got {type(batch).__name__}")
        now = time.monotonic_ns()
        self.latencies_us.append((now - batch.epoch) / 1e3)
        if batch.sequence_number != len(self.latencies_us):
            raise RuntimeError(f"message {batch.sequence_number} arrived as number {len(self.latencies_us)}")
        self.first = self.first or now / 1e9
        self.last = now / 1e9


# ------------------------------------------------------------------------------------- ZeroMQ + msgspec


def _curve(socket: zmq.Socket[Any], server: bool) -> None:
    secret = zmq.utils.z85.encode(bytes(range(32)))
    public = zmq.curve_public(secret)
    socket.curve_secretkey, socket.curve_publickey = secret, public
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public


async def _zmq_produce(port: int, load: Load, curve: bool) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    if curve:
        _curve(socket, server=True)
    socket.bind(f"tcp://127.0.0.1:{port}")
    peer, _ = await socket.recv_multipart()
    async for batch in paced(load):
        await socket.send_multipart([peer, encode(batch)], copy=False)
    await socket.recv_multipart()
    context.destroy(linger=0)


async def _zmq_consume(port: int, load: Load, curve: bool) -> Taken:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    if curve:
        _curve(socket, server=False)
    socket.connect(f"tcp://127.0.0.1:{port}")
    await socket.send(b"")
    taken = Taken()
    while len(taken.latencies_us) < load.messages:
        taken.take(await socket.recv())
    await socket.send(b"")
    await asyncio.sleep(0.05)
    context.destroy(linger=0)
    return taken


# ------------------------------------------------------------------------- the link that was built on that

LINK_TOKEN = "token of a benchmark"


class _LinkEnd:
    """A handler that keeps a router and a worker in step: up, messages, lost."""

    def __init__(self) -> None:
        self.up: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.inbox: asyncio.Queue[AnyMessage] = asyncio.Queue()

    def on_up(self, peer: Peer) -> None:
        self.up.set_result(peer)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.inbox.put_nowait(message)

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.lost.set()


async def _link_produce(port: int, load: Load) -> None:
    end = _LinkEnd()
    node = LinkNode(Peer(Role.DECODE, "worker", 1), LINK_TOKEN, end)
    node.start()
    node.listen("127.0.0.1", port)
    peer = await end.up
    async for batch in paced(load):
        node.send(peer, batch)
    await end.lost.wait()
    node.close()


async def _link_consume(port: int, load: Load) -> Taken:
    end = _LinkEnd()
    node = LinkNode(Peer(Role.ROUTER, "router", 1), LINK_TOKEN, end)
    node.start()
    node.connect(WorkerAddress("worker", Role.DECODE, 1, f"tcp://127.0.0.1:{port}"))
    taken = Taken()
    while len(taken.latencies_us) < load.messages:
        taken.take_message(await end.inbox.get())
    node.close()
    return taken


# ---------------------------------------------------------------------------------------------- grpc.aio


async def _grpc_produce(port: int, load: Load) -> None:
    import grpc  # type: ignore[import-untyped]

    finished = asyncio.Event()

    async def tokens(request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for batch in paced(load):
            yield encode(batch)
        finished.set()

    handler = grpc.unary_stream_rpc_method_handler(tokens)
    service, method = GRPC_METHOD.strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await finished.wait()
    await server.stop(grace=2)


async def _grpc_consume(port: int, load: Load) -> Taken:
    import grpc

    taken = Taken()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for data in channel.unary_stream(GRPC_METHOD)(b"", wait_for_ready=True):
            taken.take(data)
    return taken


# ------------------------------------------------------------------------------------------- Ray long-poll


def measure_ray(load: Load) -> tuple[Taken, float]:
    """A load through an actor that is asked for its tokens: what was seen, and seconds of CPU."""
    import ray

    class Source:
        """An async actor; ``poll`` returns every message that is waiting, or waits for one."""

        def __init__(self) -> None:
            self.queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4096)

        def cpu_s(self) -> float:
            return time.process_time()

        async def produce(self, load: Load) -> None:
            async for batch in paced(load):
                await self.queue.put(encode(batch))

        async def poll(self) -> list[bytes]:
            found = [await self.queue.get()]
            while not self.queue.empty():
                found.append(self.queue.get_nowait())
            return found

    async def consume() -> tuple[Taken, float]:
        source = ray.remote(num_cpus=0)(Source).options(max_concurrency=8).remote()
        start_cpu = time.process_time() + await source.cpu_s.remote()
        done = source.produce.remote(load)
        taken = Taken()
        while len(taken.latencies_us) < load.messages:
            for data in await source.poll.remote():
                taken.take(data)
        await done
        return taken, time.process_time() + await source.cpu_s.remote() - start_cpu

    return asyncio.run(consume())


# ------------------------------------------------------------------------------------------ all of them

Produce = Callable[[int, Load], Coroutine[Any, Any, None]]
Consume = Callable[[int, Load], Coroutine[Any, Any, Taken]]


async def _zmq_produce_plain(port: int, load: Load) -> None:
    await _zmq_produce(port, load, curve=False)


async def _zmq_produce_curve(port: int, load: Load) -> None:
    await _zmq_produce(port, load, curve=True)


async def _zmq_consume_plain(port: int, load: Load) -> Taken:
    return await _zmq_consume(port, load, curve=False)


async def _zmq_consume_curve(port: int, load: Load) -> Taken:
    return await _zmq_consume(port, load, curve=True)


RAY = "ray long-poll"
PAIRS: dict[str, tuple[Produce, Consume]] = {
    "zeromq+msgspec": (_zmq_produce_plain, _zmq_consume_plain),
    "zeromq+msgspec, CURVE": (_zmq_produce_curve, _zmq_consume_curve),
    "link (ZeroMQ, msgspec, CURVE, sessions)": (_link_produce, _link_consume),
    "grpc.aio stream": (_grpc_produce, _grpc_consume),
}
