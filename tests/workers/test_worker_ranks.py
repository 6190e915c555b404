"""Workers of several ranks: any prefill layout feeds any decode layout, and nothing outlives a lost rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mapped_network import MappedNetwork
from router_stand_in import wait_until
from staged_scenes import overdue

from antiphon.cluster.rank_assembly import follow_in
from antiphon.cluster.worker_assembly import assemble_worker
from antiphon.configs.schema import DeploymentConfig
from antiphon.engine.events import TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.kv_transfer.arrivals import ArrivedConnections
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.kv_transfer.plan import GroupLayout, Shard, plan_runs
from antiphon.kv_transfer.probe import probe_page
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import load_model
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import GptOssConfig
from antiphon.model.transformer import Transformer
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import RankLostError
from antiphon.protocol.identity import Role, Topology
from antiphon.protocol.kv_messages import WriteDone
from antiphon.protocol.messages import SamplingParams
from antiphon.protocol.staging_messages import StagedWrite

TOKEN = "a cluster token for tests"
TIE = 1e-3
SHAPE = GptOssConfig(
    num_hidden_layers=4,
    num_experts=4,
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    experts_per_token=2,
    sliding_window=24,
    max_context_tokens=1024,
)
PROMPTS = (5, 40, 75)
OUTPUT = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks") / "checkpoint"
    write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=3), Layout.HUGGING_FACE, 10**9)
    return directory


def deployment(
    checkpoint: Path, prefill: int, decode: int, experts: bool = False, **transfer: Any
) -> DeploymentConfig:
    pool = {"kv_cache": {"page_size_tokens": 16, "full_pages": 40, "sliding_pages": 40}, "chunk_tokens": 32}
    times = {"completion_timeout_s": 120.0, "lease_s": 20.0, "heartbeat_s": 0.2, "layer_groups": 2}
    return DeploymentConfig.model_validate(
        {
            "model": {"path": str(checkpoint), "dtype": "float32"},
            "prefill": {**pool, "tensor_parallel": prefill, "rank_timeout_s": 120},
            "decode": {
                **pool,
                "tensor_parallel": decode,
                "expert_parallel": experts and decode > 1,
                "max_batch_size": 4,
                "rank_timeout_s": 120,
            },
            "transfer": times | transfer,
        }
    )


class Worker:
    """One worker whose ranks are threads of this process."""

    def __init__(self, role: Role, config: DeploymentConfig, network: InProcessNetwork) -> None:
        size = (config.prefill if role is Role.PREFILL else config.decode).tensor_parallel
        store = dist.HashStore() if size > 1 else None
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank")
        self.followers: list[Future[None]] = [
            self._pool.submit(
                follow_in, store, role, config, rank, cluster_token=TOKEN, transport_factory=network.transport
            )
            for rank in range(1, size)
        ]
        self.worker = assemble_worker(
            role,
            f"{role}-0",
            config,
            bind_host="127.0.0.1",
            cluster_token=TOKEN,
            ranks=store,
            transport_factory=network.transport,
        )
        self.address = self.worker.start()

    def stop(self) -> None:
        self.worker.stop()
        self._pool.shutdown()
        for follower in self.followers:
            if follower.exception() is not None:
                assert isinstance(follower.exception(), RankLostError)


class Pair:
    """A prefill and a decode worker that know each other."""

    def __init__(self, config: DeploymentConfig, network: InProcessNetwork) -> None:
        self.prefill = Worker(Role.PREFILL, config, network)
        self.decode = Worker(Role.DECODE, config, network)
        for version, side in enumerate((self.decode, self.prefill)):
            side.worker.set_topology(Topology(1 + version, (self.prefill.address, self.decode.address)))
        self.until(lambda: all(status.ready for status in self.statuses()), "readiness")

    def statuses(self) -> list[Any]:
        return [side.worker.status() for side in (self.prefill, self.decode)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, 120.0, lambda: f"{what}: {self.statuses()}")

    def idle(self) -> None:
        self.until(
            lambda: all(s.pages_held == s.requests == 0 and s.failed is None for s in self.statuses()), "idle"
        )

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()


@pytest.fixture
def start(checkpoint: Path, router_type: Any) -> Iterator[Callable[..., tuple[Pair, Any]]]:
    made: list[Any] = []

    def begin(network: InProcessNetwork, *ranks: int, **options: Any) -> tuple[Pair, Any]:
        pair = Pair(deployment(checkpoint, *ranks, **options), network)
        made.append(pair)
        router = router_type()
        made.append(router)
        router.connect(pair.prefill.address, pair.decode.address)
        return pair, router

    yield begin
    for each in reversed(made):
        each.stop()
    named = ("engine", "kv-transfer", "links-", "rank")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(named)]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(21)
    return [torch.randint(2, 128, (length,), generator=generator).tolist() for length in PROMPTS]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What one rank that computes prompts itself says."""
    model: Transformer = load_model(checkpoint, torch.float32)
    margins: list[float] = []
    logits = model.logits

    def noting(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        best = found.topk(2).values
        margins.extend((best[:, 0] - best[:, 1]).tolist())
        return found

    model.logits = noting  # type: ignore[method-assign]
    config = deployment(checkpoint, 1, 1)
    loop = EngineLoop(model, EngineSettings.resolve(config.decode, SHAPE))
    params = SamplingParams(max_tokens=OUTPUT, seed=7, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts()):
        loop.submit(EngineRequest(str(index), 1, RequestKind.COLOCATED, tuple(prompt), sampling=params))
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while loop.has_work():
        for event in loop.step():
            if isinstance(event, TokensSampled):
                texts[int(event.request_id)] += event.token_ids
    assert min(margins) > TIE, "a near tie: choose another seed"
    assert all(len(set(text)) > 3 for text in texts)
    return texts


def answers(router: Any) -> list[list[int]]:
    names = [router.generate(prompt, max_tokens=OUTPUT) for prompt in prompts()]
    router.wait(*names, seconds=120)
    return [router.requests[name].tokens for name in names]


@pytest.mark.parametrize("way", ["direct", "staged", "mapped"])
@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_any_prefill_layout_feeds_any_decode_layout(
    prefill: int, decode: int, way: str, start: Any, expected: list[list[int]]
) -> None:
    mapped = MappedNetwork(required=True)
    slots = {"staging_slots": 0 if way == "direct" else 2, "staging_slot_mib": 1}
    network = mapped if way == "mapped" else InProcessNetwork()
    pair, router = start(network, prefill, decode, experts=True, **slots)
    assert answers(router) == expected
    pair.idle()
    assert pair.decode.worker.status().kv_paths["prefill-0"][0] == ("mapped" if way == "mapped" else "direct")
    if way == "mapped":  # nothing is staged, though there are slots
        assert mapped.device.copied_bytes >= pair.prefill.worker.status().counters["bytes_sent"]
    counters = pair.prefill.worker.status().counters
    writes = 2 * sum(-(-(length - 1) // 32) for length in PROMPTS)
    assert counters["writes_done"] == prefill * writes
    # Rank 0 exports what every rank wrote; probes and pieces for several ranks come on top.
    found = exported_transfers(pair)
    assert sorted(found) == [str(rank) for rank in range(prefill)]
    assert all(count >= writes for count, _ in found.values())
    assert sum(size for _, size in found.values()) >= counters["bytes_sent"] > 0


def exported_transfers(pair: Pair) -> dict[str, tuple[float, float]]:
    """Rank -> (writes, bytes) in the prefill worker's metrics; each of their histograms has as many."""
    samples = {
        (sample.name.removeprefix("antiphon_kv_transfer_"), sample.labels["rank"]): sample.value
        for family in pair.prefill.worker.metrics.registry.collect()
        if family.name.startswith("antiphon_kv_transfer_") and family.type == "histogram"
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    ranks = {rank for _, rank in samples}
    for rank in ranks:
        counts = {
            samples[f"{name}_count", rank] for name in ("seconds", "post_seconds", "bytes", "descriptors")
        }
        assert len(counts) == 1
        assert samples["seconds_sum", rank] >= samples["post_seconds_sum", rank] > 0
        assert samples["descriptors_sum", rank] >= samples["descriptors_count", rank]
    return {rank: (samples["bytes_count", rank], samples["bytes_sum", rank]) for rank in ranks}


def of_rank(rank: int) -> Callable[[bytes], bool]:
    """Picks notifications of one rank's KV."""

    def match(payload: bytes) -> bool:
        message = decode(payload) if payload else None
        return isinstance(message, WriteDone) and message.key.source_rank == rank

    return match


def test_a_lost_notification_of_another_rank_is_repeated(start: Any, expected: list[list[int]]) -> None:
    network = InProcessNetwork()
    pair, router = start(network, 2, 1)
    network.inject(Fault.LOSE_NOTIFICATION, count=2, match=of_rank(1))
    names = [router.generate(prompt, max_tokens=OUTPUT) for prompt in prompts()]
    router.wait_prefilled(*names)  # whatever is missing then, was lost or comes without being asked for
    overdue(pair.decode.worker)
    router.wait(*names, seconds=120)
    assert [router.requests[name].tokens for name in names] == expected
    pair.idle()
    assert network.happened[Fault.LOSE_NOTIFICATION] == 2
    assert pair.prefill.worker.status().counters["notifications_repeated"] >= 2
    assert all(outcome.attempts == [1] for outcome in router.requests.values())


def test_a_failed_write_of_another_rank_is_computed_again(start: Any, expected: list[list[int]]) -> None:
    network = InProcessNetwork()
    pair, router = start(network, 2, 1)
    network.inject(Fault.FAIL_WRITE, match=of_rank(1))
    assert answers(router) == expected
    pair.idle()
    assert sorted(len(outcome.attempts) for outcome in router.requests.values()) == [1, 1, 2]


@pytest.fixture
def severed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, int], int]]:
    """Which writer's connections were ended, and on which thread: each rank's transfers have one."""
    found: list[tuple[tuple[str, int], int]] = []

    def sever(arrivals: ArrivedConnections, writer: tuple[str, int]) -> bool:
        found.append((writer, threading.get_ident()))
        return True

    monkeypatch.setattr(ArrivedConnections, "sever", sever)
    return found


def threads_that_severed(severed: list[tuple[tuple[str, int], int]], side: Worker) -> int:
    life = side.address.worker_id, side.address.epoch
    return len({thread for writer, thread in severed if writer == life})


def test_every_rank_severs_a_writer_that_died(start: Any, severed: list[Any]) -> None:
    pair, _ = start(InProcessNetwork(), 1, 2)
    assert threads_that_severed(severed, pair.prefill) == 0
    pair.decode.worker.set_topology(Topology(9, (pair.decode.address,)))
    pair.until(lambda: threads_that_severed(severed, pair.prefill) == 2, "both ranks")


def is_staged(payload: bytes) -> bool:
    return bool(payload) and isinstance(decode(payload), StagedWrite)


def test_every_rank_severs_a_writer_whose_connection_broke_before_its_slots_are_used_again(
    start: Any, severed: list[Any], expected: list[list[int]]
) -> None:
    network = InProcessNetwork()
    pair, router = start(network, 2, 2, staging_slots=1, staging_slot_mib=1)
    for _ in range(2):
        network.inject(Fault.FAIL_WRITE, count=2, match=is_staged)
        assert answers(router) == expected
        pair.idle()
    assert threads_that_severed(severed, pair.prefill) == 2
    assert any(len(outcome.attempts) > 1 for outcome in router.requests.values())


def test_what_comes_over_tcp_to_another_rank_is_seen(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's share may come otherwise: what counts is the sum over ranks."""
    seen: list[int] = []

    def received(arrivals: ArrivedConnections, writer: tuple[str, int]) -> int:
        seen.append(threading.get_ident())
        return 0 if len(set(seen)) == 1 else 1 << 40

    monkeypatch.setattr(ArrivedConnections, "received_bytes", received)
    pair, _ = start(InProcessNetwork(), 1, 2)
    assert len(set(seen)) == 2
    assert pair.decode.worker.status().kv_paths["prefill-0"][0] == "tcp"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_whose_transfers_die_ends_its_worker(role: str, start: Any) -> None:
    network = InProcessNetwork()
    pair, _ = start(network, 2, 2)
    side = getattr(pair, role)
    network.kill(f"{role}-0/{side.address.epoch:x}/1")
    pair.until(lambda: side.worker.status().failed is not None, "the end of the worker")
    assert re.search(rf"RankLostError: {role}-0/1: its link ended", side.worker.status().failed)
    assert not side.worker.status().ready


def test_pages_that_a_lost_rank_may_write_are_kept_until_its_life_is_over(start: Any) -> None:
    """It hung up, but its process is there, and so may its GPU be at a copy."""
    network = InProcessNetwork()
    pair, router = start(network, 2, 1)
    network.inject(Fault.HOLD, count=9, match=of_rank(1))
    router.generate(prompts()[0], max_tokens=OUTPUT)
    prefill, decode = pair.prefill.worker, pair.decode.worker
    pair.until(lambda: network.held == prefill.status().counters.get("writes_done") == 2, "rank 0's writes")
    links = prefill._kv._links
    (rank,) = links._by_peer
    prefill._thread.call(links.on_lost, rank, "it hung up")
    pair.until(lambda: decode.status().counters.get("receives_stuck") == 1, "the end of the link")
    pair.until(lambda: decode.status().pages_quarantined > 0, "pages set aside")
    network.release_held()
    assert decode.status().pages_quarantined > 0, "nobody said that it writes no more"
    decode.set_topology(Topology(9, (pair.decode.address,)))
    pair.until(lambda: decode.status().pages_quarantined == 0, "the end of that life")


def test_a_rank_that_leaves_ends_its_worker_while_nothing_is_asked(start: Any, checkpoint: Path) -> None:
    pair, _ = start(InProcessNetwork(), 1, 2)
    group = pair.decode.worker._kv._followers._leader._group
    group.control.close()  # as the other end of a connection whose process is gone
    pair.until(lambda: pair.decode.worker.status().failed is not None, "the end of the worker")
    assert "RankLostError" in pair.decode.worker.status().failed


@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (4, 2), (2, 4)])
def test_a_probe_shows_a_head_in_the_wrong_place(mine: int, theirs: int) -> None:
    layout = GroupLayout(layers=2, kv_heads=4, head_bytes=32)
    target = bytearray(layout.page_bytes(Shard(theirs, 0)))
    for swapped in (False, True):
        for rank in range(mine):
            source = probe_page(7, "full", layout, Shard(mine, rank))
            if swapped:
                source = source[len(source) // 2 :] + source[: len(source) // 2]
            for begin, to, length in plan_runs(
                layout, Shard(mine, rank), Shard(theirs, 0), [(0, 0)], range(2)
            ).tolist():
                target[to : to + length] = source[begin : begin + length]
        assert (bytes(target) == probe_page(7, "full", layout, Shard(theirs, 0))) is not swapped
    assert probe_page(7, "full", layout, Shard(1, 0)) != probe_page(9, "full", layout, Shard(1, 0))
    assert probe_page(7, "full", layout, Shard(1, 0)) != probe_page(7, "sliding", layout, Shard(1, 0))
