"""Whatever a peer says, in messages that can be decoded, the worker lives and goes on with what it has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from any_message import EVERY_CLASS, REQUESTS_AND_KV, AnyMessages
from fake_model import VOCABULARY
from msgspec.structs import replace
from router_stand_in import TOKEN, wait_until

from antiphon.kv_transfer.handshake import agent_name, span_of
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.rank_links import RankLinks
from antiphon.protocol.codec import encode
from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.kv_messages import (
    AnnounceWrites,
    CancelWrites,
    GrantWrites,
    KvHello,
    KvProbe,
    KvProbeResult,
    KvRefused,
    KvWelcome,
    MissingWrites,
    RankMemory,
    WriteDone,
    WriteKey,
    WritesDrained,
    WritesFailed,
)
from antiphon.protocol.link import LinkNode, LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import (
    AbortRequest,
    GenerateRequest,
    Hello,
    KvTicket,
    Message,
    PrefillRequest,
    SamplingParams,
    TokensAck,
)
from antiphon.protocol.rank_messages import RankReady
from antiphon.protocol.staging_messages import SlotFree, StagedPages, StagedWrite

Start = Callable[..., tuple[Any, Any]]
MESSAGES = 1500
EPOCH = 77


class Stranger:
    """A peer that is let in and says anything."""

    def __init__(self, role: Role, name: str) -> None:
        self.errors: list[BaseException] = []
        self.handshake = 0
        """The last one that a worker began with it."""
        self.thread = LinkThread(f"links-{name}", self.errors.append)
        self.thread.start()
        settings = LinkSettings(heartbeat_s=0.1, lease_s=120.0)
        self.peer = Peer(role, name, EPOCH)
        self.node = LinkNode(self.peer, TOKEN, self, settings)
        self.thread.call(self.node.start)
        endpoint = self.thread.call(self.node.listen, "127.0.0.1")
        self.address = WorkerAddress(name, role, EPOCH, endpoint)

    def on_up(self, peer: Peer) -> None: ...

    def on_lost(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, message: object) -> None:
        if isinstance(message, KvHello):
            self.handshake = message.handshake

    def stop(self) -> None:
        self.thread.call(self.node.close)
        self.thread.stop()
        assert not self.errors


@pytest.fixture
def stranger() -> Iterator[Callable[[Role, str], Stranger]]:
    made: list[Stranger] = []

    def make(role: Role, name: str) -> Stranger:
        made.append(Stranger(role, name))
        return made[-1]

    yield make
    for each in made:
        each.stop()


class Memory:
    """What a stranger registered: as much as a worker has."""

    def __init__(self, network: InProcessNetwork, like: RankMemory, name: str) -> None:
        self.buffers = [np.zeros(each.pages * each.page_bytes, dtype=np.uint8) for each in like.regions]
        agent = agent_name(name, EPOCH, 0)
        self.transport = network.transport(agent)
        regions = tuple(
            replace(region, address=buffer.ctypes.data)
            for region, buffer in zip(like.regions, self.buffers, strict=True)
        )
        self.transport.register([span_of(region) for region in regions])
        self.rank = RankMemory(0, agent, self.transport.metadata(), regions)


class Scene:
    """A worker that answers somebody, and two strangers that say anything to it."""

    def __init__(self, started: Start, stranger: Any, told: Role) -> None:
        network = InProcessNetwork()
        self.pair, self.router = started(network.transport)
        self.worker = self.pair.decode if told is Role.DECODE else self.pair.prefill
        address = self.pair.decode_address if told is Role.DECODE else self.pair.prefill_address
        self.peer = stranger(Role.PREFILL if told is Role.DECODE else Role.DECODE, "odd-0")
        self.other_router = stranger(Role.ROUTER, "odd-1")
        self.memory = Memory(network, self.pair.decode._kv.endpoint.memory, "odd-0")
        self.to = Peer(told, address.worker_id, address.epoch)
        self.pair.version += 1
        known = (self.pair.prefill_address, self.pair.decode_address, self.peer.address)
        self.worker.set_topology(type(self.pair).topology(self.pair.version, *known))
        for each in self.strangers:
            if each.peer.role is not Role.DECODE:  # a prefill worker dials those
                each.thread.call(each.node.connect, address)
            wait_until(lambda each=each: each.node.is_up(self.to), what="the link")
        self.name = self.router.generate(self.router.random_prompt(90), max_tokens=80)
        wait_until(lambda: self.router.tickets.get(self.name), what="the reservation")

    @property
    def strangers(self) -> tuple[Stranger, Stranger]:
        return self.peer, self.other_router

    def known(self) -> list[object]:
        """What a peer may have heard of: names, epochs, memory of both sides, a ticket."""
        epochs = [EPOCH, 1, self.pair.decode_address.epoch, self.pair.prefill_address.epoch]
        names = ["odd-0", "odd-1", "odd", "decode-0", "prefill-0"]
        memories = [self.memory.rank, self.pair.prefill._kv.endpoint.memory]
        metadata = [b"", *(each.agent_metadata for each in memories)]
        return [*epochs, *names, *memories, *metadata, self.pair.decode._fingerprint, *self.tickets()]

    def tickets(self) -> list[KvTicket]:
        """One that another decode worker gave, and one of the stranger."""
        theirs = self.router.tickets[self.name]
        return [
            theirs,
            replace(theirs, decode_worker_id="odd-0", decode_epoch=EPOCH, request_id="odd", attempt=1),
        ]

    def right(self) -> list[Message]:
        """What peers that mean well could say at this moment."""
        mine = self.tickets()[1]
        life, decode_epoch = ("odd-0", EPOCH), self.pair.decode_address.epoch
        kv = *life, self.pair.decode._fingerprint, 1, (self.memory.rank,)
        tokens = [token % VOCABULARY for token in range(mine.kv_tokens + 1)]
        writes = [WriteKey(0, chunk, group) for chunk in range(3) for group in range(2)]
        found: list[Message] = [
            KvHello(*kv),
            KvProbe(EPOCH, decode_epoch, 4096, 0.1),
            KvWelcome(*kv, {"full": 0, "sliding": 0}),
            KvProbeResult(EPOCH, True, ""),
            TokensAck(1),
        ]
        for name in ("odd", self.name):
            work = name, 1
            found += [
                AnnounceWrites(*work, *life, decode_epoch, 1, writes),
                WritesFailed(*work, EPOCH, decode_epoch, "connection", "broken"),
                WritesDrained(*work, EPOCH, decode_epoch),
                GrantWrites(*work, EPOCH, 1),
                CancelWrites(*work, EPOCH),
                MissingWrites(*work, EPOCH, writes),
            ]
        for attempt in range(1, 5):
            found += [
                GenerateRequest("odd", attempt, tokens, [], SamplingParams(max_tokens=5, seed=1)),
                PrefillRequest("odd", attempt, tokens, replace(mine, attempt=attempt)),
                AbortRequest("odd", attempt, "asked"),
            ]
        return found

    def make_ready(self) -> None:
        """Have a prefill worker trust the stranger, so that it ships to it."""
        kv = self.pair.decode._fingerprint, 1, (self.memory.rank,)
        wait_until(lambda: self.peer.handshake, what="the hello")
        self.say(self.timely(KvWelcome("odd-0", EPOCH, *kv, {"full": 0, "sliding": 0})))

        def ready() -> bool:
            self.say(self.timely(KvProbeResult(EPOCH, True, "")))
            return "odd-0" in self.worker.status().kv_peers

        wait_until(ready, what="trust")

    def timely(self, message: Message) -> Message:
        """What answers a worker's hello, as an answer to its last one."""
        if not isinstance(message, KvWelcome | KvRefused | KvProbeResult):
            return message
        return replace(message, handshake=self.peer.handshake)

    def say(self, message: Message) -> None:
        """Have the stranger say it that may; the other where both or none may."""
        odd = self.other_router if isinstance(message, FROM_ROUTERS) else self.peer
        if not odd.node.send(self.to, message):
            wait_until(lambda: odd.node.is_up(self.to), what="the link, which a peer may end")

    def check(self) -> None:
        status = self.worker.status()
        assert status.failed is None, status.failed


LAST = (Hello, KvHello, KvWelcome, KvRefused, KvProbe, KvProbeResult, TokensAck)
"""Said last: most of what is wrong with them ends the handshake or the link."""
FROM_ROUTERS = (GenerateRequest, PrefillRequest, AbortRequest, TokensAck)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("told", [Role.DECODE, Role.PREFILL])
def test_a_worker_outlives_any_message(told: Role, seed: int, started: Start, stranger: Any) -> None:
    scene = Scene(started, stranger, told)
    messages = AnyMessages(seed, scene.known(), scene.right())
    if told is Role.PREFILL:
        scene.make_ready()
    work = [kind for kind in REQUESTS_AND_KV if kind not in LAST]
    for kinds in (work, REQUESTS_AND_KV):
        for number in range(MESSAGES):
            drawn = messages.draw(kinds[number % len(kinds)])
            # Three of four answers are not of another handshake, which nobody would look into.
            scene.say(drawn if number % 4 == 0 else scene.timely(drawn))
            if number % 50 == 0:
                scene.check()
    for kind in EVERY_CLASS:
        scene.say(messages.draw(kind))
    scene.check()
    scene.router.wait(scene.name)
    assert scene.router.requests[scene.name].tokens == scene.router.requests[scene.name].expected()
    again = scene.router.generate(scene.router.random_prompt(60))
    scene.router.wait(again)
    scene.check()


@pytest.mark.parametrize("told", [Role.DECODE, Role.PREFILL])
def test_a_worker_outlives_any_notification(told: Role, started: Start, make_config: Any) -> None:
    """They come with the transfers, from an agent that may write here."""
    deployment = make_config(staging_slots=2, staging_slot_mib=1)
    pair, router = started(InProcessNetwork().transport, deployment=deployment)
    ends = {Role.PREFILL: pair.prefill, Role.DECODE: pair.decode}
    worker = ends.pop(told)
    (sender,) = ends.values()
    to = worker._kv.endpoint.memory.agent_name
    key, me = WriteKey(0, 0, 0), pair.prefill_address.epoch
    epochs = me, pair.decode_address.epoch
    pages = (StagedPages("full", (1, 2)), StagedPages("sliding", (3,)))
    right = [
        StagedWrite("odd", 1, *epochs, key, 0, 1, 1, 1, 1 << 20, pages),
        SlotFree("odd", 1, key, 0, 1),
        WriteDone("odd", 1, *epochs, key),
    ]
    known = [me, epochs[1], 1, "odd", "full", b"", key, *pages, pair.decode._fingerprint]
    messages = AnyMessages(0, known, right)
    chance = random.Random(0)
    transfer = sender._kv.endpoint._transfer
    for number in range(MESSAGES):
        kind = chance.choice((*EVERY_CLASS, *[type(each) for each in right] * 10))
        payload = encode(messages.draw(kind))
        if number % 4 == 0:  # cut off, or something else in its middle
            cut = chance.randrange(len(payload) + 1)
            payload = payload[:cut] + chance.choice((b"", chance.randbytes(7)))
        transfer.run(lambda transport, payload=payload: transport.notify(to, payload)).result(60)
    # A slot that an odd message has claimed refuses what its writer really sends, until it is spread.
    endpoint = worker._kv.endpoint
    for _ in range(2):  # a turn that begins now takes every notification
        endpoint._transfer.run(lambda transport: None).result(60)
    wait_until(lambda: not endpoint._receiver._spreading, what="the odd writes")
    name = router.generate(router.random_prompt(60))
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    status = worker.status()
    assert status.failed is None
    refused = {Role.DECODE: "staged_messages_refused", Role.PREFILL: "notifications_unknown"}
    assert status.counters[refused[told]] > 30


@pytest.mark.parametrize("page", [-1, 1000, 2**62, 2**64 - 1])
@pytest.mark.parametrize("group", ["full_pages", "sliding_pages"])
def test_a_ticket_for_pages_that_there_are_not_fails_its_job_alone(
    group: str, page: int, started: Start
) -> None:
    pair, router = started(InProcessNetwork().transport)
    router.hold_prefill = True
    name = router.generate(router.random_prompt(90))
    wait_until(lambda: name in router.tickets, what="the reservation")
    ticket = router.tickets[name]
    router.tickets[name] = replace(ticket, **{group: [page] * len(getattr(ticket, group))})
    router.hold_prefill = False
    router.thread.call(router._prefill_again, name, ticket.attempt)
    router.wait(name)
    router.wait_prefill_failed(name)
    failed = router.requests[name].prefill_failures
    assert [failure.stage for failure in failed] == ["post"]
    assert f"pages [{page}" in failed[0].reason
    assert "of decode-0, which has " in failed[0].reason
    assert router.requests[name].tokens == router.requests[name].expected(), "decode reserved again"
    pair.wait_idle()


def test_a_rank_that_is_not_awaited_is_not_taken() -> None:
    errors: list[BaseException] = []
    thread = LinkThread("links-d", errors.append)
    me, settings = Peer(Role.DECODE, "d", 1), LinkSettings(heartbeat_s=0.1, lease_s=120.0)
    links = RankLinks(
        *(me, 3, thread, TOKEN, settings),
        publish=lambda meeting: None,
        on_landed=lambda sender, payload: None,
        on_lost=errors.append,
        on_write=lambda rank, sample: None,
    )

    def ready(name: str, rank: int) -> None:
        links.on_message(Peer(Role.DECODE, name, 1), RankReady(RankMemory(rank, f"d/1/{rank}", b"", ())))

    for name, rank in (("d/1", 1), ("d/1", 1), ("d/0", 0), ("d/3", 3), ("d/-1", -1), ("d/1", 2)):
        ready(name, rank)
        assert not links._everyone.done()
    for _ in range(2):
        ready("d/2", 2)
        assert [rank.memory.rank for rank in links._everyone.result(0)] == [1, 2]
    assert not errors
