"""KV written by one layout and read by another: every pair of 1, 2 and 4 ranks says the same text.

Pages move by the transfer plan, so this also holds that the model and the plan agree about which rank has
which head, and about the order within a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import PageTable, Sequence
from antiphon.kv_transfer.plan import Shard, group_layouts, plan_runs
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.protocol.messages import SamplingParams

Ranks = Callable[..., list[Any]]
PAGE, PAGES, PROMPT, OUTPUT = 16, 6, 60, 25
SIDES = (1, 2, 4)
TIE = 1e-3
GROUPS = ("full", "sliding")
PREFILL_PAGES = PageTable(full=[3, 0, 5, 1, 4, 2], sliding=[1, 4, 0, 2, 5, 3])
DECODE_PAGES = PageTable(full=[0, 2, 4, 1, 3, 5], sliding=[5, 3, 1, 0, 2, 4])


def build(config: GptOssConfig, group: RankGroup, experts: bool) -> ParallelTransformer:
    layout = ParallelLayout(group.size, experts, group.rank)
    model = ParallelTransformer(config, layout, group.communicator, torch.float32)
    fill(model, shard_parameters(config, layout, synthesize_parameters(config, seed=4)))
    return model


def empty_cache(config: GptOssConfig, ranks: int, full_fp8: bool = False) -> PagedKvCache:
    return PagedKvCache(
        config,
        full_pages=PAGES,
        sliding_pages=PAGES,
        page_size=PAGE,
        dtype=torch.float32,
        kv_heads=config.num_key_value_heads // ranks,
        full_fp8=full_fp8,
    )


def sequence_of(tokens: list[int], pages: PageTable) -> Sequence:
    params = SamplingParams(max_tokens=OUTPUT, seed=1, temperature=0.0)
    sequence = Sequence(EngineRequest("r", 1, RequestKind.COLOCATED, tuple(tokens), sampling=params), 0, 0.0)
    sequence.pages = pages
    return sequence


def prompt_of(config: GptOssConfig) -> list[int]:
    generator = torch.Generator().manual_seed(9)
    tokens: list[int] = torch.randint(0, config.vocab_size, (PROMPT,), generator=generator).tolist()
    return tokens


@pytest.fixture(scope="module")
def prefilled(spread_config: GptOssConfig, in_ranks: Ranks) -> dict[int, list[PagedKvCache]]:
    """Ranks -> each rank's cache after all tokens of the prompt but the last, in two chunks."""
    return {ranks: prefill(spread_config, in_ranks, ranks) for ranks in SIDES}


def prefill(config: GptOssConfig, in_ranks: Ranks, ranks: int, full_fp8: bool = False) -> list[PagedKvCache]:
    tokens = prompt_of(config)

    def work(group: RankGroup) -> PagedKvCache:
        model = build(config, group, experts=False)
        cache = empty_cache(config, group.size, full_fp8)
        sequence = sequence_of(tokens, PREFILL_PAGES)
        for start, end in ((0, 32), (32, PROMPT - 1)):
            chunk = [Work(sequence, start, end - start, samples=False)]
            model.forward(build_forward_batch(chunk, PAGE, torch.device("cpu")), cache)
        return cache

    return in_ranks(ranks, work)


def ship(sources: list[PagedKvCache], targets: list[PagedKvCache]) -> None:
    """Copies bytes by the plan, from every rank to every rank."""
    layouts = group_layouts(sources[0].fingerprint("model", "revision"))
    for group in GROUPS:
        there = zip(getattr(PREFILL_PAGES, group), getattr(DECODE_PAGES, group), strict=True)
        pairs = list(there)[: -(-(PROMPT - 1) // PAGE)]
        layers = range(layouts[group].layers)
        for source_rank, source in enumerate(sources):
            for target_rank, target in enumerate(targets):
                shards = Shard(len(sources), source_rank), Shard(len(targets), target_rank)
                mine, theirs = (cache.memory(group).view(-1).view(torch.uint8) for cache in (source, target))
                for begin, to, length in plan_runs(layouts[group], *shards, pairs, layers).tolist():
                    theirs[to : to + length] = mine[begin : begin + length]


def decode(
    model: ParallelTransformer, cache: PagedKvCache, prompt: list[int], margins: list[float] | None = None
) -> list[int]:
    """Greedy text; ``margins`` collects by how much each choice was the best."""
    tokens = list(prompt)
    for _ in range(OUTPUT):
        sequence = sequence_of(tokens, DECODE_PAGES)
        step = [Work(sequence, len(tokens) - 1, 1, samples=True)]
        hidden = model.forward(build_forward_batch(step, PAGE, torch.device("cpu")), cache)
        tokens.append(int(model.greedy(hidden)))
        if margins is not None:
            best = model.top_k(hidden, 2)[0][0]
            margins.append(float(best[0] - best[1]))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(spread_config: GptOssConfig) -> list[int]:
    """The text of one rank that computed its own KV in the pages it decodes from."""
    tokens = prompt_of(spread_config)
    model, cache = build(spread_config, RankGroup.single(), experts=False), empty_cache(spread_config, 1)
    start = [Work(sequence_of(tokens, DECODE_PAGES), 0, PROMPT - 1, samples=False)]
    model.forward(build_forward_batch(start, PAGE, torch.device("cpu")), cache)
    margins: list[float] = []
    text = decode(model, cache, tokens, margins)
    assert len(set(text)) > 8
    assert min(margins) > TIE, "a near tie: choose another seed"
    return text


@pytest.mark.parametrize("decode_ranks", SIDES)
@pytest.mark.parametrize("prefill_ranks", SIDES)
def test_any_prefill_layout_feeds_any_decode_layout(
    prefill_ranks: int,
    decode_ranks: int,
    prefilled: dict[int, list[PagedKvCache]],
    expected: list[int],
    spread_config: GptOssConfig,
    in_ranks: Ranks,
) -> None:
    tokens = prompt_of(spread_config)
    caches = [empty_cache(spread_config, decode_ranks) for _ in range(decode_ranks)]
    ship(prefilled[prefill_ranks], caches)

    def work(group: RankGroup) -> list[int]:
        model = build(spread_config, group, experts=True)  # decode's standard: experts whole
        return decode(model, caches[group.rank], tokens)

    assert in_ranks(decode_ranks, work) == [expected] * decode_ranks


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 4)])
def test_fp8_pages_feed_any_decode_layout(
    prefill_ranks: int, decode_ranks: int, spread_config: GptOssConfig, in_ranks: Ranks
) -> None:
    """The text of one rank that computed such pages itself; ranks write the heads that one rank writes."""
    tokens = prompt_of(spread_config)
    sources = prefill(spread_config, in_ranks, prefill_ranks, full_fp8=True)
    alone = prefill(spread_config, in_ranks, 1, full_fp8=True)[0]
    whole = torch.cat([source.memory("full") for source in sources], dim=2)
    assert float((whole != alone.memory("full")).float().mean()) < 1e-3, "sums of ranks may round otherwise"
    caches = [empty_cache(spread_config, decode_ranks, full_fp8=True) for _ in range(decode_ranks)]
    ship(sources, caches)

    def work(group: RankGroup) -> list[int]:
        return decode(build(spread_config, group, experts=True), caches[group.rank], tokens)

    own = [empty_cache(spread_config, 1, full_fp8=True)]
    ship([alone], own)
    expected = decode(build(spread_config, RankGroup.single(), experts=False), own[0], tokens)
    assert len(set(expected)) > 8
    assert in_ranks(decode_ranks, work) == [expected] * decode_ranks


def test_a_head_that_went_to_the_wrong_rank_would_be_seen(
    prefilled: dict[int, list[PagedKvCache]], spread_config: GptOssConfig, in_ranks: Ranks
) -> None:
    tokens = prompt_of(spread_config)
    right, wrong = ([empty_cache(spread_config, 2) for _ in range(2)] for _ in range(2))
    ship(prefilled[4], right)
    ship([prefilled[4][rank] for rank in (0, 2, 1, 3)], wrong)

    def texts(caches: list[PagedKvCache]) -> list[int]:
        text: list[int] = in_ranks(
            2, lambda group: decode(build(spread_config, group, experts=True), caches[group.rank], tokens)
        )[0]
        return text

    assert texts(right) != texts(wrong)
