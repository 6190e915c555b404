"""Two ends of staged writes over a network of this process, one rank each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_staging import KvStaging
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.model.config import GptOssConfig
from antiphon.protocol.rank_messages import ShipOrder, StepMark

SHAPE = GptOssConfig(
    num_hidden_layers=4,
    num_experts=4,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    sliding_window=32,
)

PAGES, PAGE = 12, 16


def order(full: list[tuple[int, int]], sliding: list[tuple[int, int]], group: int = 0) -> ShipOrder:
    return ShipOrder("r", 1, 2, 0, group, tuple(full), tuple(sliding), StepMark(0, 0))


class NetworkArrivals:
    """What arrives at one agent of a network of this process."""

    def __init__(self, network: InProcessNetwork, agent: str) -> None:
        self.network, self.agent = network, agent
        self.closed = threading.Event()
        self.closed.set()
        """Cleared: a severed connection takes its time to close."""
        self.found_closed = 0

    def begin_claim(self) -> None: ...

    def claim(self, writer: tuple[str, int]) -> None: ...

    def received_bytes(self, writer: tuple[str, int]) -> int:
        return 0

    def sever(self, writer: tuple[str, int]) -> bool:
        if not self.closed.is_set():
            return False
        self.network.sever(f"{writer[0]}/{writer[1]:x}/", self.agent)
        self.found_closed += 1
        return True


class Side:
    """One rank of one worker, over a network of this process."""

    def __init__(self, network: InProcessNetwork, name: str, epoch: int, slots: int) -> None:
        import torch

        self.arrivals = NetworkArrivals(network, f"{name}/{epoch:x}/0")
        self.cache = PagedKvCache(
            SHAPE, full_pages=PAGES, sliding_pages=PAGES, page_size=PAGE, dtype=torch.float32
        )
        self.heard: list[tuple[str, bytes]] = []
        self.failures: list[BaseException] = []
        self.fences = StepFences()
        fingerprint = self.cache.fingerprint("m", "")
        self.endpoint = KvEndpoint(
            EndpointSettings(name, epoch, fingerprint, layer_groups=2, write_timeout_s=120.0),
            Shard(1, 0),
            self.cache,
            self.fences,
            staging=KvStaging(self.cache, slots, 2**14),
            on_notification=lambda sender, payload: self.heard.append((sender, payload)),
            on_landed=lambda sender, payload: self.heard.append((sender, payload)),
            on_failure=self.failures.append,
            transport_factory=network.transport,
            arrivals=self.arrivals,
        )
        self.memory = self.endpoint.start()
        self.life = PeerLife(name, epoch)


class Ends:
    def __init__(self) -> None:
        self.network = InProcessNetwork(max_delay_polls=3)
        self.source, self.target = Side(self.network, "p", 1, 2), Side(self.network, "d", 2, 4)
        for group in ("full", "sliding"):
            self.source.cache.memory(group).normal_()
        self.connect(severed=False)
        writer = self.source.life, 1, [self.source.memory]
        self.target.endpoint.connect(*writer, granted=SlotRange(0, 2)).result(60)

    def connect(self, *, severed: bool) -> None:
        them = self.target.life, 1, [self.target.memory], SlotRange(0, 2)
        self.source.endpoint.connect(*them, severed=severed).result(60)

    def reconnect(self) -> None:
        """What the two workers do when a connection broke."""
        self.target.endpoint.sever(self.source.life).result(60)
        self.connect(severed=True)
        self.probe()

    def probe(self) -> None:
        """The end of a handshake, from when on the target takes what is staged."""
        source, target = self.source.endpoint, self.target.endpoint
        target.clear_probe().result(60)
        pages = {group: self.target.cache.probe_page(group) for group in ("full", "sliding")}
        source.write_probe(self.target.life, pages).result(60)
        target.check_probe(self.source.life).result(60)
        settle(self.target)

    def ship(self, group: int) -> Any:
        full = [(page, (page * 5 + 1) % PAGES) for page in range(PAGES)]
        return self.source.endpoint.ship(self.target.life, order(full, [(3, 4), (1, 0)], group))

    def check(self) -> None:
        for group, pairs in (
            ("full", [(p, (p * 5 + 1) % PAGES) for p in range(PAGES)]),
            ("sliding", [(3, 4), (1, 0)]),
        ):
            mine, theirs = self.source.cache.memory(group), self.target.cache.memory(group)
            for page, other in pairs:
                assert np.array_equal(mine[page].numpy(), theirs[other].numpy())


def until(condition: Callable[[], object], what: Callable[[], object] = lambda: "it") -> None:
    """Poll until true; fails the test otherwise."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what()} did not come within 60 s"
        time.sleep(0.002)


def settle(*sides: Side) -> None:
    """Come back once the sides' threads have done what was asked of them, and what follows from that."""
    for _ in range(20):  # more hands than any transfer has
        for side in sides:
            side.endpoint._transfer.run(lambda transport: None).result(60)
