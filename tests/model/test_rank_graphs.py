"""The order of commands around captured work; the graphs themselves need GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_graphs import RankGraphs
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.protocol.errors import RankLostError

Build = Callable[..., ParallelTransformer]
Ranks = Callable[..., list[Any]]
PAGE = 8


def note(seen: list[Any]) -> Callable[[int, int], None]:
    """An ``after_layer`` that writes down (step, layer)."""
    return lambda step, layer: seen.append((step, layer))


def prompt(config: GptOssConfig, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


class OneToken:
    """Pages enough for a model that is only asked for logits."""

    def __init__(self, model: ParallelTransformer) -> None:
        shape = (1, len(model.shape.kv_heads), 2, PAGE, model.config.head_dim)
        self._pages = torch.zeros(shape)

    def layer(self, index: int) -> Tensor:
        return self._pages


class Recorded:
    """Stands in for a graph of rank 0."""

    output = torch.zeros(1)

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_what_rank_0_captures_all_ranks_capture_and_replay(
    small: GptOssConfig, in_ranks: Ranks, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    """The order of commands around a graph; the graphs themselves need GPUs."""
    seen: list[tuple[int, str]] = []
    theirs: weakref.WeakSet[Graph] = weakref.WeakSet()
    left: list[int] = []

    class Graph:
        def __init__(self) -> None:
            theirs.add(self)

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
            end = group.close

            def close() -> None:
                left.append(len(theirs))
                end()

            monkeypatch.setattr(group, "close", close)
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
        held = weakref.ref(graph)
        replays = graph.replays
        del graph
        leader.close()
        assert held() is None, "NCCL's communicator would wait for the end of rank 0's graph"
        with pytest.raises(RankLostError, match="left"):
            on_all.replay()
        return replays

    assert in_ranks(2, work) == [2, 0]
    assert left[0] == 0, "its own graphs are gone before a rank leaves"
    pools = ["captures into pool None", *["captures into pool 7"] * 2]
    assert [what for _, what in seen] == [*pools, "replayed", "replayed"]


def test_a_graph_that_was_not_captured_here_is_refused_by_its_number() -> None:
    graphs = RankGraphs()
    with pytest.raises(RankLostError, match="graph 3, which was not captured here"):
        graphs.replay(3, lambda part: None)
    assert not graphs.is_step(3)


class RecordedParts(Recorded):
    """Stands in for graphs of rank 0, one for each layer group."""

    def replay(self, after_part: Callable[[int], None]) -> None:  # type: ignore[override]
        self.replays += 1
        after_part(0)
        after_part(1)


def test_a_step_captured_in_parts_counts_and_says_of_each_part_when_it_is_issued(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, monkeypatch: pytest.MonkeyPatch, build: Build
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
