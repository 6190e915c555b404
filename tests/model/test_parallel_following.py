"""Rank 0 leads and the others follow: in order, with the same sizes, and never alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.batch_wire import BatchSizes, pack, unpack
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import ConfigError, RankLostError

Ranks = Callable[..., list[Any]]
Forward = Callable[..., Tensor]
PAGE = 8


def build(config: GptOssConfig, group: RankGroup, **options: Any) -> ParallelTransformer:
    layout = ParallelLayout(group.size, True, group.rank)
    model = ParallelTransformer(config, layout, group.communicator, torch.float32, **options)
    fill(
        model,
        (
            (name, part)
            for name, part in shard_parameters(config, layout, synthesize_parameters(config))
            if model.unembedding is not None or name != "unembedding.weight"
        ),
    )
    return model


@pytest.fixture(scope="module")
def small(spread_config: GptOssConfig) -> GptOssConfig:
    return replace(spread_config, num_hidden_layers=2)


class OneToken:
    """Pages enough for a model that is only asked for logits."""

    def __init__(self, model: ParallelTransformer) -> None:
        shape = (1, len(model.shape.kv_heads), 2, PAGE, model.config.head_dim)
        self._pages = torch.zeros(shape)

    def layer(self, index: int) -> Tensor:
        return self._pages


def note(seen: list[Any]) -> Callable[[int, int], None]:
    """An ``after_layer`` that writes down (step, layer)."""
    return lambda step, layer: seen.append((step, layer))


def prompt(config: GptOssConfig, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


def random_batch(tokens: int, sequences: int, full_pages: int, sliding_pages: int) -> ForwardBatch:
    def group(pages: int) -> PagedSequences:
        short = {"dtype": torch.int32}
        return PagedSequences(
            torch.randint(-1, 99, (sequences, pages), **short),  # type: ignore[call-overload]
            torch.randint(0, 99, (sequences + 1,), **short),  # type: ignore[call-overload]
            torch.randint(0, 99, (sequences,), **short),  # type: ignore[call-overload]
            torch.randint(-1, 10**12, (tokens,)),
        )

    ids = torch.randint(0, 10**6, (2, tokens))
    return ForwardBatch(ids[0], ids[1], group(full_pages), group(sliding_pages))


def tensors_of(batch: ForwardBatch) -> list[Tensor]:
    groups = (batch.full, batch.sliding)
    fields = ("block_table", "query_start", "kv_len", "slot")
    return [batch.token_ids, batch.positions, *(getattr(g, name) for g in groups for name in fields)]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 3, 5, 2), (513, 9, 0, 33), (4, 4, 17, 17)])
def test_a_batch_arrives_as_it_was_sent(sizes: tuple[int, int, int, int]) -> None:
    batch = random_batch(*sizes)
    found = BatchSizes.of(batch)
    assert found == BatchSizes(*sizes)
    buffer = pack(batch)
    assert buffer.shape == (found.total_bytes,)
    for sent, arrived in zip(tensors_of(batch), tensors_of(unpack(buffer, found)), strict=True):
        assert sent.dtype == arrived.dtype
        assert torch.equal(sent, arrived)


def test_a_batch_of_another_dtype_is_not_sent_as_something_else() -> None:
    batch = random_batch(3, 2, 1, 1)
    with pytest.raises(ValueError, match=r"torch\.int32 \[3\], not torch\.int64 \[3\]"):
        pack(replace(batch, positions=batch.positions.int()))


def test_the_leader_is_one_model_to_its_caller(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, forward: Forward
) -> None:
    """Steps, logits, choices and messages, in the order in which rank 0 gave them."""
    token_ids = prompt(small, 30)
    single = Transformer(small, torch.float32)
    fill(single, synthesize_parameters(small))
    expected = forward(single, token_ids)

    def lead(model: ParallelTransformer, group: RankGroup) -> list[Any]:
        leader = LeaderModel(model, group)
        leader.start()
        kv = one_sequence(model, 30, PAGE)
        layers: list[int] = []
        parts = []
        with torch.inference_mode():  # as an engine calls it
            for begin in range(0, 30, 12):
                leader.publish(b"chunk %d" % begin)
                batch = kv.batch(token_ids[begin : begin + 12], begin)
                parts.append(leader.forward(batch, kv, layers.append))
            hidden = torch.cat(parts)
            leader.publish(b"")
            logits, greedy, best = leader.logits(hidden), leader.greedy(hidden), leader.top_k(hidden[:2], 5)
        leader.close()
        leader.close()
        torch.testing.assert_close(hidden, expected, atol=5e-5, rtol=0)
        torch.testing.assert_close(logits, single.logits(expected), atol=5e-5, rtol=0)
        assert torch.equal(greedy, logits.argmax(-1))
        torch.testing.assert_close(best[0], logits[:2].topk(5).values, atol=5e-5, rtol=0)
        assert layers == [0, 1] * 3
        return []

    def work(group: RankGroup) -> list[Any]:
        model = build(small, group)
        if group.rank == 0:
            return lead(model, group)
        seen: list[Any] = []
        kv = one_sequence(model, 30, PAGE)
        FollowerLoop(model, kv, group, after_layer=note(seen), on_message=seen.append).run()
        return seen

    chunks = zip((b"chunk 0", b"chunk 12", b"chunk 24"), (1, 2, 3), strict=True)
    follower = [*(x for name, step in chunks for x in (name, (step, 0), (step, 1))), b""]
    assert in_ranks(4, work) == [[], *[follower] * 3]


def test_a_rank_that_still_loads_is_waited_for(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    """Loading may take longer than any operation of a step."""

    def work(group: RankGroup) -> bool:
        model = build(small, group)
        if group.rank > 0:
            time.sleep(4.0)
            FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()
            return True
        leader = LeaderModel(model, group)
        leader.start()
        leader.close()
        return True

    assert in_ranks(2, work, timeout_s=2.0) == [True, True]


def test_a_message_given_during_a_step_follows_it(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    """An engine announces written layers from within its step; that must not wait for the step to end."""

    def work(group: RankGroup) -> list[Any]:
        model = build(small, group)
        kv = one_sequence(model, 16, PAGE)
        seen: list[Any] = []
        if group.rank > 0:
            FollowerLoop(model, kv, group, after_layer=note(seen), on_message=seen.append).run()
            return seen
        leader = LeaderModel(model, group)
        leader.start()
        for begin in (0, 8):
            batch = kv.batch(prompt(small, 8), begin)
            leader.forward(batch, kv, lambda layer: leader.publish(b"layer %d" % layer))
        leader.close()
        return seen

    steps = [[(step, 0), (step, 1), b"layer 0", b"layer 1"] for step in (1, 2)]
    assert in_ranks(2, work) == [[], [*steps[0], *steps[1]]]


def test_a_bad_choice_is_refused_before_the_others_hear_of_it(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank > 0:
            FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()
            return
        leader = LeaderModel(model, group)
        leader.start()
        hidden = torch.zeros(1, small.hidden_size)
        with pytest.raises(ValueError, match=r"k 129 is not within 1 \.\. 128"):
            leader.top_k(hidden, 129)
        assert leader.top_k(hidden, 128)[0].shape == (1, 128)
        leader.close()

    in_ranks(2, work)


def test_a_leader_of_one_rank_works_alone(small: GptOssConfig, one_sequence: Any) -> None:
    group = RankGroup.single()
    model = build(small, group)
    leader = LeaderModel(model, group)
    leader.start()
    kv = one_sequence(model, 20, PAGE)
    batch = kv.batch(prompt(small, 20), 0)
    with torch.inference_mode():
        hidden = leader.forward(batch, kv)
        assert torch.equal(hidden, model.forward(batch, kv))
        assert torch.equal(leader.logits(hidden), model.logits(hidden))
    leader.close()


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, r"num_experts: rank 0 has 8, rank 1 has 16"),
        ({"rms_norm_eps": 1e-6}, r"rms_norm_eps: rank 0 has 1e-05, rank 1 has 1e-06"),
    ],
)
def test_ranks_with_different_models_do_not_start(
    change: Change, message: str, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small if group.rank == 0 else replace(small, **change), group)
        if group.rank == 0:
            with pytest.raises(ConfigError, match=message):
                LeaderModel(model, group).start()
        else:
            with pytest.raises(ConfigError, match=message):
                FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()

    in_ranks(2, work)


@pytest.mark.parametrize(
    ("capacity", "page", "message"),
    [(64, 8, r"full pages: rank 0 has 4, this one 8"), (16, 4, r"page size: rank 0 has 8, this one 4")],
)
def test_a_follower_with_other_pages_refuses_the_step_and_releases_the_leader(
    capacity: int, page: int, message: str, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            kv = one_sequence(model, 32, PAGE)
            leader = LeaderModel(model, group)
            leader.start()
            begin = time.monotonic()
            with pytest.raises(RankLostError, match="rank 0 of 2"):
                leader.forward(kv.batch(prompt(small, 8), 0), kv)
            assert time.monotonic() - begin < 10  # long before the timeout of 30 s
            with pytest.raises(RankLostError, match="stopped before"):
                leader.logits(torch.zeros(1, small.hidden_size))
            leader.close()
        else:
            with pytest.raises(ConfigError, match=message):
                FollowerLoop(model, one_sequence(model, capacity, page), group).run()

    in_ranks(2, work)


def test_a_failure_on_rank_0_releases_the_others(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    """Rank 0's step fails half-way, for a reason of its own; the others must not wait for the rest of it."""
    lost: list[BaseException] = []
    released = threading.Event()

    def fail(layer: int) -> None:
        raise MemoryError(f"no memory after layer {layer}")

    def work(group: RankGroup) -> None:
        model = build(small, group)
        kv = one_sequence(model, 8, PAGE)
        if group.rank == 0:
            leader = LeaderModel(model, group, on_lost=lost.append)
            leader.start()
            with pytest.raises(MemoryError):
                leader.forward(kv.batch(prompt(small, 8), 0), kv, fail)
            assert released.wait(10)  # long before the timeout of 30 s, and before anybody tidies up here
            leader.close()
        else:
            with pytest.raises(RankLostError, match="rank 1 of 2"):
                FollowerLoop(model, kv, group).run()
            released.set()

    in_ranks(2, work)
    assert [type(error) for error in lost] == [MemoryError]


def test_a_quiet_leader_is_not_taken_for_a_dead_one(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    """No request comes for longer than an operation may take."""

    def work(group: RankGroup) -> bool:
        model = build(small, group)
        kv = one_sequence(model, 8, PAGE)
        if group.rank == 0:
            leader = LeaderModel(model, group)
            leader.start()
            time.sleep(5.0)
            leader.forward(kv.batch(prompt(small, 8), 0), kv)
            leader.close()
        else:
            FollowerLoop(model, kv, group).run()
        return True

    assert in_ranks(2, work, timeout_s=3.0) == [True, True]


def test_a_silent_follower_is_noticed_while_nothing_is_asked(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    """It holds its connection open and answers no more."""
    noticed = threading.Event()

    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            leader: LeaderModel

            def on_lost(error: BaseException) -> None:
                leader.close()
                noticed.set()

            leader = LeaderModel(model, group, heartbeat_s=0.2, on_lost=on_lost)
            leader.start()
            assert noticed.wait(15)
            with pytest.raises(RankLostError, match="stopped before"):
                leader.logits(torch.zeros(1, small.hidden_size))
            leader.close()
        else:
            group.agree(model.facts())
            assert noticed.wait(15)

    in_ranks(2, work, timeout_s=1.5)


def publish_until_noticed(leader: LeaderModel) -> None:
    """A message may be on its way before the other end has closed."""
    for _ in range(100):
        leader.publish(b"more")
        time.sleep(0.05)


def test_a_message_that_nobody_takes_is_an_error(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            leader = LeaderModel(model, group)
            leader.start()
            leader.publish(b"four")
            with pytest.raises(RankLostError):
                publish_until_noticed(leader)
        else:
            with pytest.raises(ConfigError, match="4 bytes"):
                FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()

    in_ranks(2, work)


def test_a_rank_that_does_not_appear_is_named_as_such() -> None:
    with pytest.raises(RankLostError, match=r"rank 0 of 2: the ranks did not all join within 1 s"):
        RankGroup.join(dist.HashStore(), 0, 2, join_timeout_s=1.0)


def test_the_meeting_place_is_open_to_this_host_only() -> None:
    store = open_store(0, 2)
    connections = psutil.Process().net_connections("tcp")
    listening = {
        c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    other = open_store(1, 2, port=store.port, timeout_s=5.0)
    store.set("word", "said")
    assert other.get("word") == b"said"


def test_a_meeting_place_that_is_taken_or_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RankLostError, match=rf"rank 0 of 2: no meeting place at 127\.0\.0\.1:{port}: .*in use"
        ):
            open_store(0, 2, port=port)
    with pytest.raises(RankLostError, match=rf"rank 1 of 2: no meeting place at 127\.0\.0\.1:{port}"):
        open_store(1, 2, port=port, timeout_s=1.0)


class Recorded:
    """Stands in for a graph of rank 0."""

    output = torch.zeros(1)

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_what_rank_0_captures_all_ranks_capture_and_replay(
    small: GptOssConfig, in_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of commands around a graph; the graphs themselves need GPUs."""
    seen: list[tuple[int, str]] = []

    class Graph:
        def pool(self) -> int:
            return 7

        def replay(self) -> None:
            seen.append((1, "replayed"))

    class Recording:
        def __init__(self, graph: Graph, pool: int | None, capture_error_mode: str) -> None:
            seen.append((1, f"captures into pool {pool}"))

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)

    def work(group: RankGroup) -> int:
        model = build(small, group)
        if group.rank > 0:
            FollowerLoop(model, OneToken(model), group).run()
            return 0
        leader = LeaderModel(model, group)
        leader.start()
        hidden = torch.zeros(1, small.hidden_size)
        graph = Recorded()
        assert leader.for_all_ranks(graph) is graph, "nothing was captured"
        model.device = torch.device("cuda")
        capturing = [True, True, False]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
        leader.logits(hidden)
        on_all = leader.for_all_ranks(graph)
        leader.logits(hidden)
        leader.logits(hidden)
        with pytest.raises(RuntimeError, match="a graph of 2 commands"):
            leader.for_all_ranks(graph)
        capturing[0] = False
        on_all.replay()
        on_all.replay()
        model.device = torch.device("cpu")
        leader.close()
        return graph.replays

    assert in_ranks(2, work) == [2, 0]
    pools = ["captures into pool None", *["captures into pool 7"] * 2]
    assert [what for _, what in seen] == [*pools, "replayed", "replayed"]


class RecordedParts(Recorded):
    """Stands in for graphs of rank 0, one for each layer group."""

    def replay(self, after_part: Callable[[int], None]) -> None:  # type: ignore[override]
        self.replays += 1
        after_part(0)
        after_part(1)


def test_a_step_captured_in_parts_counts_and_says_of_each_part_when_it_is_issued(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager step 1, captured step 2, replayed steps 3 and 4; the graphs themselves need GPUs."""
    seen: list[Any] = []

    class Graph:
        def capture_begin(self, pool: int | None, capture_error_mode: str) -> None:
            seen.append("begin")

        def capture_end(self) -> None:
            seen.append("end")

        def pool(self) -> int:
            return 7

        def replay(self) -> None:
            seen.append("replayed")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ends = list(range(small.num_hidden_layers))[-2:]

    def work(group: RankGroup) -> list[tuple[int, int, bool]]:
        model = build(small, group)
        kv = one_sequence(model, 30, PAGE)
        if group.rank > 0:
            FollowerLoop(model, kv, group, after_layer=note(seen), group_ends=ends).run()
            return []
        leader = LeaderModel(model, group)
        leader.start()
        batch = kv.batch(prompt(small, 12), 0)
        with torch.inference_mode():
            leader.reserve(12)
            leader.forward(batch, kv, lambda layer: None)
            model.device = torch.device("cuda")
            capturing = [True]
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
            leader.forward(batch, kv, lambda layer: None)
            capturing[0] = False
        on_all = leader.parts_for_all_ranks(RecordedParts())
        marks: list[tuple[int, int, bool]] = []
        for _ in range(2):
            on_all.replay(lambda part: marks.append((leader.steps, part, leader.computing)))
        assert not leader.computing
        model.device = torch.device("cpu")
        leader.close()
        return marks

    assert in_ranks(2, work)[0] == [(3, 0, True), (3, 1, True), (4, 0, True), (4, 1, True)]
    eager, replayed = [(1, layer) for layer in range(small.num_hidden_layers)], []
    for step in (3, 4):
        replayed += ["replayed", (step, ends[0]), "replayed", (step, ends[1])]
    assert seen == [*eager, "begin", "end", "begin", "end", *replayed]
