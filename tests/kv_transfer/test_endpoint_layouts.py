"""Pages of any number of source ranks arrive in those of any number of ranks, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from staged_ends import until
from torch import Tensor

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_staging import KvStaging
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint
from antiphon.kv_transfer.handshake import check_peer
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.model.config import GptOssConfig
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import HandshakeError, TransferError
from antiphon.protocol.kv_messages import KvHello, WriteDone
from antiphon.protocol.rank_messages import ShipOrder, StepMark

SHAPE = GptOssConfig(
    num_hidden_layers=4,
    num_experts=8,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=8,
    sliding_window=32,
)
PAGES, PAGE, GROUPS = 6, 16, 2
FULL = tuple((page, (page * 5 + 2) % PAGES) for page in range(PAGES - 1))
SLIDING = ((4, 1), (5, 3))
UNTOUCHED = 77.0


class Worker:
    """All ranks of one worker; ``heard`` are the landed and notified writes, from whichever rank."""

    def __init__(
        self, network: InProcessNetwork, name: str, epoch: int, ranks: int, slots: int, full_fp8: bool
    ) -> None:
        self.life = PeerLife(name, epoch)
        self.heard: list[bytes] = []
        self.failures: list[BaseException] = []
        self.caches, self.endpoints = [], []
        for rank in range(ranks):
            cache = PagedKvCache(
                SHAPE,
                full_pages=PAGES,
                sliding_pages=PAGES,
                page_size=PAGE,
                dtype=torch.float32,
                kv_heads=SHAPE.num_key_value_heads // ranks,
                full_fp8=full_fp8,
            )
            endpoint = KvEndpoint(
                EndpointSettings(name, epoch, cache.fingerprint("m", ""), GROUPS, write_timeout_s=120.0),
                Shard(ranks, rank),
                cache,
                StepFences(),
                staging=KvStaging(cache, slots, 2**15) if slots else None,
                on_notification=lambda sender, payload: self.heard.append(payload),
                on_landed=lambda sender, payload: self.heard.append(payload),
                on_failure=self.failures.append,
                transport_factory=network.transport,
            )
            self.caches.append(cache)
            self.endpoints.append(endpoint)
        self.memories = [endpoint.start() for endpoint in self.endpoints]

    def whole(self, group: str) -> Tensor:
        """[page, layer, every head, K|V, token, dim], of FP8 pages [page, layer, every head, bytes]."""
        return torch.cat([cache.memory(group) for cache in self.caches], dim=2)

    def fill(self, group: str, value: Tensor | float) -> None:
        heads = SHAPE.num_key_value_heads // len(self.caches)
        for rank, cache in enumerate(self.caches):
            mine = value[:, :, rank * heads : (rank + 1) * heads] if isinstance(value, Tensor) else value
            cache.memory(group)[:PAGES].copy_(torch.as_tensor(mine))

    def connect(
        self, peer: Worker, slots: SlotRange | None = None, *, granted: SlotRange | None = None
    ) -> None:
        for endpoint in self.endpoints:
            them = peer.life, len(peer.endpoints), peer.memories
            endpoint.connect(*them, slots, granted=granted).result(60)


Make = Callable[..., Worker]


@pytest.fixture
def network() -> InProcessNetwork:
    return InProcessNetwork(max_delay_polls=3)


@pytest.fixture
def make(network: InProcessNetwork) -> Iterator[Make]:
    made = []

    def worker(name: str, epoch: int, ranks: int, slots: int, full_fp8: bool = False) -> Worker:
        made.append(Worker(network, name, epoch, ranks, slots, full_fp8))
        return made[-1]

    yield worker
    for each in made:
        for endpoint in each.endpoints:
            endpoint.stop()
        assert not each.failures
    assert "kv-transfer" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("slots", [0, 2], ids=["direct", "staged"])
@pytest.mark.parametrize(
    ("sources", "targets"), [(1, 8), (8, 1), (2, 8), (8, 2), (8, 4), (4, 8), (8, 8), (2, 4), (4, 1)]
)
def test_every_head_arrives_in_its_place(sources: int, targets: int, slots: int, make: Make) -> None:
    check_arrival(make("p", 1, sources, slots), make("d", 2, targets, slots), slots)


@pytest.mark.parametrize("slots", [0, 2], ids=["direct", "staged"])
@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2), (8, 4), (1, 1)])
def test_fp8_pages_arrive_bit_for_bit(sources: int, targets: int, slots: int, make: Make) -> None:
    check_arrival(make("p", 1, sources, slots, True), make("d", 2, targets, slots, True), slots)


def check_arrival(source: Worker, target: Worker, slots: int) -> None:
    """Every head of what is shipped lies in its place, nothing else was touched, nothing was sent twice."""
    sources, targets = len(source.endpoints), len(target.endpoints)
    generator = torch.Generator().manual_seed(sources * 10 + targets)
    expected = {}
    for group, pairs in (("full", FULL), ("sliding", SLIDING)):
        like = source.whole(group)[:PAGES]
        content = (torch.randn(like.shape, generator=generator) * 50 + 128).to(like.dtype)
        source.fill(group, content)
        target.fill(group, UNTOUCHED)
        expected[group] = torch.full_like(content, UNTOUCHED)
        for mine, theirs in pairs:
            expected[group][theirs] = content[mine]
    allotted = SlotRange(0, slots) if slots else None
    source.connect(target, allotted)
    target.connect(source, granted=allotted)
    shipped = []
    for group in range(GROUPS):
        order = ShipOrder("r", 1, 2, 0, group, FULL, SLIDING, StepMark(0, 0))
        shipped += [endpoint.ship(target.life, order) for endpoint in source.endpoints]
    sizes = [each.result(60).size_bytes for each in shipped]
    for group, content in expected.items():
        assert torch.equal(target.whole(group)[:PAGES], content)
    full, sliding = (source.whole(group)[0].nbytes for group in ("full", "sliding"))
    assert sum(sizes) == len(FULL) * full + len(SLIDING) * sliding, "every byte is sent by one rank"
    until(lambda: len(written(target)) >= GROUPS * sources, lambda: f"all of {written(target)}")
    assert written(target) == {(rank, group) for rank in range(sources) for group in range(GROUPS)}


def test_a_peer_that_cannot_be_told_of_what_several_ranks_have_is_connected_anew(
    make: Make, network: InProcessNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else may ever show it: bytes that a GPU writes itself do not go over the connection."""
    source, target = make("p", 1, 1, 0), make("d", 2, 2, 0)
    source.connect(target)

    def broken(sender: str, receiver: str, payload: bytes) -> None:
        raise TransferError("notify", "remote disconnect")

    monkeypatch.setattr(network, "notify", broken)
    order = ShipOrder("r", 1, 2, 0, 0, FULL, SLIDING, StepMark(0, 0))
    with pytest.raises(TransferError, match="remote disconnect") as caught:
        source.endpoints[0].ship(target.life, order).result(60)
    assert caught.value.stage == "connection"


def test_workers_whose_full_layers_hold_different_things_are_not_paired(make: Make) -> None:
    plain, fp8 = (make(name, 1, 1, 0, kind) for name, kind in (("p", False), ("d", True)))
    prints = [worker.caches[0].fingerprint("m", "") for worker in (plain, fp8)]
    theirs = KvHello("d", 1, prints[1], 1, tuple(fp8.memories))
    with pytest.raises(HandshakeError) as refused:
        check_peer(prints[0], theirs)
    assert str(refused.value) == "full_kv_dtype: 'float32' here, 'fp8_e4m3' at the peer"


def written(worker: Worker) -> set[tuple[int, int]]:
    """(source rank, layer group) of every write that is complete, all of its parts together."""
    parts: dict[tuple[int, int], set[int]] = {}
    wanted: dict[tuple[int, int], int] = {}
    for payload in list(worker.heard):
        message = decode(payload)
        assert isinstance(message, WriteDone)
        key = message.key.source_rank, message.key.layer_group
        parts.setdefault(key, set()).add(message.part)
        wanted[key] = message.parts
    return {key for key, seen in parts.items() if len(seen) == wanted[key]}
