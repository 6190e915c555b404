"""One rank of ``test_rank_chunks_cuda``, as a process: chunks that two GPUs replay against the same launched.

Told by its arguments: rank, port of rank 0's store, model, layer groups, whether it samples, whether launches
are fused. Ends with an error when a page of either rank, or what a trained model says behind replayed pages,
is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from antiphon.benchmarks.model_step import PAGE
from antiphon.benchmarks.rank_agreement import (
    DECODED,
    LEAST_SHARE,
    Subject,
    choices,
    one_sequence,
    single_model,
    subject,
)
from antiphon.benchmarks.rank_process import Rank
from antiphon.demo.shape import MODEL_NAME
from antiphon.engine.batch import Work
from antiphon.engine.chunk_graphs import ChunkGraphs, input_words
from antiphon.engine.device_runtime import CudaRuntime
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import PageTable, Sequence
from antiphon.engine.settings import EngineSettings
from antiphon.engine.step_memory import StepMemory
from antiphon.model.parallel.cuda_transformer import CudaRankTransformer
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.reduce_limits import limits_of
from antiphon.model.parallel.sharding import shard_parameters

PAGES = 48
SIZES = (64, 256, 1024, 2048)
RANDOMISE, KEEP, COMPARE = b"randomise", b"keep", b"compare"


class Pages:
    """One rank's cache: what a replay made of random pages, against what launches make of the same."""

    def __init__(self, cache: PagedKvCache, rank: int) -> None:
        self.cache, self._rank = cache, rank
        self._before: list[Tensor] = []
        self._replayed: list[Tensor] = []
        self._said: dict[bytes, Callable[[], None]] = {
            RANDOMISE: self.randomise,
            KEEP: self.keep,
            COMPARE: self.compare,
        }

    def _memory(self) -> list[Tensor]:
        return [self.cache.memory(group) for group in ("full", "sliding")]

    def obey(self, said: bytes) -> None:
        """Do what rank 0 does at the same place in the order of steps."""
        self._said[said]()

    def randomise(self) -> None:
        torch.manual_seed(self._rank)
        for memory in self._memory():
            memory.normal_()
        self._before = [memory.clone() for memory in self._memory()]

    def keep(self) -> None:
        self._replayed = [memory.clone() for memory in self._memory()]
        for memory, before in zip(self._memory(), self._before, strict=True):
            assert not torch.equal(memory, before), "the replay wrote nothing"
            memory.copy_(before)

    def compare(self) -> None:
        for memory, replayed in zip(self._memory(), self._replayed, strict=True):
            assert torch.equal(memory.view(torch.int16), replayed.view(torch.int16)), f"rank {self._rank}"


class Replays:
    """Rank 0: chunks of sequences whose logical pages are the cache's first ones, in order."""

    def __init__(self, leader: LeaderModel, cache: PagedKvCache, layer_groups: int) -> None:
        settings = EngineSettings(
            page_size_tokens=PAGE,
            full_pages=PAGES,
            sliding_pages=PAGES,
            window_tokens=leader.config.sliding_window,
            max_context_tokens=PAGES * PAGE,
            vocab_size=leader.config.vocab_size,
            chunk_tokens=SIZES[-1],
            layer_groups=layer_groups,
            overlap=True,
            chunk_graph_tokens=SIZES,
        )
        self._runtime = CudaRuntime(cache.device)
        self.graphs = ChunkGraphs(leader, cache, self._runtime, settings)
        self._memory = StepMemory(self._runtime, 1, 0, input_words(settings))

    def replay(self, tokens: Tensor, start: int, count: int) -> tuple[Tensor, list[int]]:
        """Hidden state [1, H] of the last of ``count`` tokens from ``start`` on, and the announced parts."""
        request = EngineRequest("r", 1, RequestKind.PREFILL_ONLY, tuple(tokens.tolist()))
        sequence = Sequence(request, 0, 0.0)
        sequence.pages = PageTable(list(range(PAGES)), list(range(PAGES)), 0)
        parts: list[int] = []
        host = self._memory.take()
        work = Work(sequence, start, count, samples=False, chunk=0)
        issue = self.graphs.prepare(work, host, parts.append)
        hidden: list[Tensor] = []
        host.in_use = self._runtime.submit(lambda: hidden.append(issue().clone()))
        host.in_use.wait()
        host.in_use = None
        return hidden[0], parts


def same_as_launched(leader: LeaderModel, pages: Pages, replays: Replays, groups: int) -> None:
    """Padded and not, at a prompt's beginning and behind a prefix: bit for bit, on both ranks."""
    tokens = torch.randint(0, leader.config.vocab_size, (PAGES * PAGE,))
    for start in (0, 901):
        for count in (1, 63, 64, 200, 256, 700, 1024, 1025, 2048):
            size = min(size for size in SIZES if size >= count)
            leader.publish(RANDOMISE)
            pages.randomise()
            hidden, parts = replays.replay(tokens, start, count)
            assert parts == list(range(groups))
            leader.publish(KEEP)
            pages.keep()
            with torch.inference_mode():
                launched = leader.forward(replays.graphs.batch(size), pages.cache)[count - 1 : count]
            leader.publish(COMPARE)
            pages.compare()
            assert bool(hidden.isfinite().all())
            assert torch.equal(hidden.view(torch.int16), launched.view(torch.int16)), (start, count)


@torch.inference_mode()
def replayed_choices(leader: LeaderModel, cache: PagedKvCache, replays: Replays, text: Tensor) -> Tensor:
    """argmax [DECODED] of decode steps that are told what to read, behind a prompt that is replayed."""
    tokens, prompt = text.to(cache.device), text.shape[0] - DECODED
    for start in range(0, prompt, SIZES[-1]):
        replays.replay(text, start, min(SIZES[-1], prompt - start))
    table = torch.arange(PAGES, device=cache.device)
    found = []
    for place in range(prompt, tokens.shape[0]):
        hidden = leader.forward(one_sequence(tokens[place : place + 1], place, table), cache)
        found.append(leader.logits(hidden).argmax(-1))
    return torch.cat(found)


def as_one_gpu_says(
    about: Subject, leader: LeaderModel, cache: PagedKvCache, replays: Replays, expected: list[Tensor]
) -> None:
    """Teacher-forced: the same token at nearly every position, of a trained model."""
    found = [replayed_choices(leader, cache, replays, text) for text in about.texts]
    equal = torch.cat([a == b[-DECODED:] for a, b in zip(found, expected, strict=True)]).float().mean()
    print(f"{about.name}: {float(equal):.4f} of the positions behind replayed prompts agree with one GPU")
    assert about.name != MODEL_NAME or float(equal) >= LEAST_SHARE


def make_cache(config: Any, ranks: int, device: torch.device) -> PagedKvCache:
    return PagedKvCache(
        config,
        full_pages=PAGES,
        sliding_pages=PAGES,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
        kv_heads=config.num_key_value_heads // ranks,
    )


def main(number: int, port: int, name: str, groups: int, samples: bool, fused: bool) -> None:
    """This rank's life."""
    rank = Rank(number, argparse.Namespace(ranks=2, device="cuda", out=None), port)
    about = subject(name)
    expected: list[Tensor] = []
    if samples and number == 0:
        single = single_model(rank, about)
        expected = [choices(single, text, rank.device, None) for text in about.texts]
        del single
        rank.empty_cache()
    layout = ParallelLayout(2, True, number)
    model = CudaRankTransformer(
        *(about.config, layout, rank.group.communicator),
        *(shard_parameters(about.config, layout, about.parameters(rank.device)), rank.device),
        row_reduce=rank.fused(limits_of(2), about.config.hidden_size),
        with_unembedding=samples,
        fused=fused,
    )
    pages = Pages(make_cache(about.config, 2, rank.device), number)
    ends = pages.cache.last_layers(groups)
    if number:
        seen: list[tuple[int, int]] = []

        def obey(said: bytes) -> None:
            if said == KEEP:  # right after a replay
                assert seen[-groups:] == [(seen[-1][0], layer) for layer in ends], "announced otherwise"
            pages.obey(said)

        FollowerLoop(
            *(model, pages.cache, rank.group),
            after_layer=lambda step, layer: seen.append((step, layer)),
            on_message=obey,
            group_ends=ends,
        ).run()
    else:
        leader = LeaderModel(model, rank.group)
        leader.start()
        replays = Replays(leader, pages.cache, groups)
        same_as_launched(leader, pages, replays, groups)
        if samples:
            as_one_gpu_says(about, leader, pages.cache, replays, expected)
        leader.close()
    print(f"rank {number}: replayed chunks are the launched ones")


if __name__ == "__main__":
    said = sys.argv[1:]
    main(int(said[0]), int(said[1]), said[2], int(said[3]), said[4] == "samples", said[5] == "fused")
