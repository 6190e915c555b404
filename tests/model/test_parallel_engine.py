"""An unchanged engine on rank 0 drives all ranks: same texts as an engine on one rank, in every layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.events import SequenceFinished, SequencePreempted, TokensSampled
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import LanguageModel
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer
from antiphon.protocol.messages import SamplingParams

Ranks = Callable[..., list[Any]]
Forward = Callable[..., Tensor]
TIE = 1e-3
NO_YES = (False, True)
PAGE, FULL_PAGES, SLIDING_PAGES = 16, 10, 9


def settings(config: GptOssConfig, overlap: bool, graphs: bool = False) -> EngineSettings:
    return EngineSettings(
        page_size_tokens=PAGE,
        full_pages=FULL_PAGES,
        sliding_pages=SLIDING_PAGES,
        window_tokens=config.sliding_window,
        max_context_tokens=160,
        vocab_size=config.vocab_size,
        chunk_tokens=32,
        max_batch_size=8,
        headroom_tokens=PAGE,
        layer_groups=2,
        overlap=overlap,
        decode_graphs=graphs,
        chunk_graph_tokens=(8, 32) if graphs else (),
    )


def requests() -> list[EngineRequest]:
    """Mixed lengths, a common beginning of two pages, and more text than pages."""
    params = SamplingParams(max_tokens=24, seed=1, temperature=0.0, ignore_eos=True)
    generator = torch.Generator().manual_seed(11)
    start = torch.randint(2, 128, (32,), generator=generator).tolist()
    found = []
    for index, length in enumerate((1, 9, 20, 41, 50)):
        rest = torch.randint(2, 128, (length,), generator=generator).tolist()
        prompt = (*start, *rest) if index % 2 else tuple(rest)
        found.append(EngineRequest(f"r{index}", 1, RequestKind.COLOCATED, prompt, sampling=params))
    return found


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "top-p": {"temperature": 0.9, "top_p": 0.7},
    "top-k": {"temperature": 1.1, "top_k": 5},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    "bias": {"temperature": 0.0, "logit_bias": ((3, 4.0), (7, -5.0))},
    "logprobs": {"temperature": 1.0, "top_logprobs": 3},
}


def sampled_requests(*ways: str) -> list[EngineRequest]:
    found = []
    for index, way in enumerate(ways):
        prompt = torch.randint(2, 128, (9 + index,), generator=torch.Generator().manual_seed(index)).tolist()
        params = SamplingParams(**{"max_tokens": 12, "seed": 40 + index, "ignore_eos": True} | SAMPLED[way])
        found.append(
            EngineRequest(f"{index} {way}", 1, RequestKind.COLOCATED, tuple(prompt), sampling=params)
        )
    return found


def run(
    model: LanguageModel,
    overlap: bool,
    kv_heads: int | None = None,
    graphs: bool = False,
    sampled: tuple[str, ...] = (),
) -> dict[str, list[int]]:
    """Tokens of every request, from an engine that has to preempt some of ``requests``."""
    loop = EngineLoop(model, settings(model.config, overlap, graphs), kv_heads=kv_heads)
    asked = sampled_requests(*sampled) if sampled else requests()
    for request in asked:
        loop.submit(request)
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    finished = preempted = 0
    for _ in range(2000):
        if not loop.has_work():
            break
        for event in loop.step():
            finished += isinstance(event, SequenceFinished)
            preempted += isinstance(event, SequencePreempted)
            if isinstance(event, TokensSampled):
                assert event.position == len(tokens[event.request_id])
                tokens[event.request_id] += event.token_ids
    assert finished == len(asked)
    assert preempted or sampled
    loop.check_pages()
    return dict(tokens)


@pytest.fixture(scope="module")
def single(spread_config: GptOssConfig) -> Transformer:
    model = Transformer(spread_config, torch.float32)
    fill(model, synthesize_parameters(spread_config, seed=2))
    return model


@pytest.fixture(scope="module")
def expected(single: Transformer) -> dict[str, list[int]]:
    return run(single, overlap=False)


def part_of(config: GptOssConfig, layout: ParallelLayout, group: RankGroup) -> ParallelTransformer:
    """One rank's part of the model that ``single`` is."""
    model = ParallelTransformer(config, layout, group.communicator, torch.float32)
    fill(model, shard_parameters(config, layout, synthesize_parameters(config, seed=2)))
    return model


def follow(model: ParallelTransformer, config: GptOssConfig, group: RankGroup) -> None:
    """Do as rank 0 says, to the end."""
    pages = PagedKvCache(
        config,
        full_pages=FULL_PAGES,
        sliding_pages=SLIDING_PAGES,
        page_size=PAGE,
        dtype=torch.float32,
        kv_heads=len(model.shape.kv_heads),
    )
    FollowerLoop(model, pages, group).run()


def assert_equal_up_to_ties(
    found: dict[str, list[int]], expected: dict[str, list[int]], single: Transformer, forward: Forward
) -> None:
    """Texts may part only where one rank's two best logits are as good as equal."""
    for request in requests():
        ours, theirs = found[request.request_id], expected[request.request_id]
        assert len(ours) == len(theirs)
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        context = torch.tensor([*request.prompt_token_ids, *theirs[:at]])
        best = single.logits(forward(single, context)[-1:]).topk(2).values[0]
        assert float(best[0] - best[1]) < TIE, f"{request.request_id} differs at {at}"


@pytest.mark.parametrize(
    ("ranks", "experts", "overlap", "graphs"),
    [
        *((ranks, experts, overlap, False) for ranks in (2, 4) for experts in NO_YES for overlap in NO_YES),
        (2, True, True, True),
    ],
)
def test_batches_chunks_prefixes_and_preemption_equal_one_rank(
    ranks: int,
    experts: bool,
    overlap: bool,
    graphs: bool,
    single: Transformer,
    expected: dict[str, list[int]],
    in_ranks: Ranks,
    forward: Forward,
) -> None:
    config = single.config

    def work(group: RankGroup) -> dict[str, list[int]] | None:
        layout = ParallelLayout(ranks, experts, group.rank)
        model = part_of(config, layout, group)
        kv_heads = len(model.shape.kv_heads)
        if group.rank > 0:
            follow(model, config, group)
            return None
        leader = LeaderModel(model, group)
        leader.start()
        tokens = run(leader, overlap, kv_heads, graphs)
        leader.close()
        return tokens

    found = in_ranks(ranks, work)[0]
    assert_equal_up_to_ties(found, expected, single, forward)


def test_requests_that_are_aborted_within_a_step_leave_the_others_their_texts(
    single: Transformer, in_ranks: Ranks
) -> None:
    """Chunks and steps are replayed; an abort arrives while what it ends is on its way to all ranks."""
    config, ways = single.config, ("greedy", "drawn", "drawn", "greedy", "drawn", "greedy")
    aborted = {sampled_requests(*ways)[index].request_id for index in (1, 2, 5)}
    expected = run(single, overlap=True, sampled=ways)

    def work(group: RankGroup) -> dict[str, list[int]] | None:
        layout = ParallelLayout(2, True, group.rank)
        model = part_of(config, layout, group)
        kv_heads = len(model.shape.kv_heads)
        if group.rank > 0:
            follow(model, config, group)
            return None
        leader = LeaderModel(model, group)
        leader.start()
        loop = EngineLoop(leader, settings(config, True, graphs=True), kv_heads=kv_heads)
        forward, left = model.forward, sorted(aborted)

        def aborting(*arguments: Any) -> Tensor:
            if loop.snapshot().running and left:
                loop.abort(left.pop(), 1)
            return forward(*arguments)

        model.forward = aborting  # type: ignore[method-assign]
        for request in sampled_requests(*ways):
            loop.submit(request)
        tokens: defaultdict[str, list[int]] = defaultdict(list)
        while loop.has_work():
            for event in loop.step():
                if isinstance(event, TokensSampled):
                    tokens[event.request_id] += event.token_ids
        assert not left
        loop.check_pages()
        leader.close()
        return dict(tokens)

    found = in_ranks(2, work)[0]
    for name, tokens in expected.items():
        if name in aborted:
            assert found.get(name, []) == tokens[: len(found.get(name, []))]
            assert len(found.get(name, [])) < len(tokens)
        else:
            assert found[name] == tokens


def test_the_texts_are_worth_comparing(expected: dict[str, list[int]]) -> None:
    assert all(len(set(tokens)) > 8 for tokens in expected.values())
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


@pytest.mark.parametrize(
    ("sampled", "gathers", "graphs"),
    [
        (("greedy", "greedy"), False, True),
        (("drawn", "drawn"), False, True),
        (("greedy", "drawn", "greedy"), False, False),
        *((("drawn", way), True, False) for way in SAMPLED if way not in ("greedy", "drawn")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_logits_are_gathered_only_where_a_row_needs_them(
    sampled: tuple[str, ...],
    gathers: bool,
    graphs: bool,
    single: Transformer,
    spread_config: GptOssConfig,
    in_ranks: Ranks,
) -> None:
    expected = run(single, overlap=True, sampled=sampled)
    gathered: list[int] = []

    def work(group: RankGroup) -> dict[str, list[int]] | None:
        layout = ParallelLayout(2, True, group.rank)
        model = part_of(spread_config, layout, group)
        kv_heads = len(model.shape.kv_heads)
        if group.rank > 0:
            follow(model, spread_config, group)
            return None
        whole = model.logits

        def noting(hidden: Tensor) -> Tensor:
            gathered.append(len(hidden))
            return whole(hidden)

        model.logits = noting  # type: ignore[method-assign]
        leader = LeaderModel(model, group)
        leader.start()
        found = run(leader, True, kv_heads, graphs, sampled)
        leader.close()
        return found

    assert in_ranks(2, work)[0] == expected
    assert bool(gathered) is gathers
