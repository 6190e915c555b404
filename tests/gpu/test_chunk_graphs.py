"""Replayed chunks of prompts on a real GPU against the same chunks issued launch by launch, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.chunk_graphs import ChunkGraphs, input_words
from antiphon.engine.device_runtime import CudaRuntime
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import PageTable, Sequence
from antiphon.engine.settings import EngineSettings
from antiphon.engine.step_memory import StepMemory
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.cuda_transformer import CudaTransformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 64
PAGES = 48
SIZES = (64, 256, 512, 1024, 2048)
MODELS = {
    "20b-resident": ("gpt-oss-20b", True, None),
    "20b-widened": ("gpt-oss-20b", False, None),
    "120b-widened": ("gpt-oss-120b", False, None),
    "20b-resident-128": ("gpt-oss-20b", True, ChunkChoices(expert_tile=128)),
    "20b-projections": ("gpt-oss-20b", False, ChunkChoices(fp8_projections=True)),
}
"""Shape, whether FP8 experts are resident, and choices: every road of chunks, streamed for small sizes, with
the router and the ranking in one launch for all others but the largest."""


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest) -> Iterator[CudaTransformer]:
    shape, resident, choices = request.param
    config = replace(preset(shape), num_hidden_layers=4)
    made = CudaTransformer(
        config, synthesize_parameters(config, 0, "cuda"), resident_fp8=resident, chunks=choices
    )
    yield made
    del made
    torch.cuda.empty_cache()


class Chunks:
    """Captured chunks of a model over a cache of shuffled pages, poisoned with large values."""

    def __init__(self, model: CudaTransformer, layer_groups: int = 2) -> None:
        self.model = model
        self.settings = EngineSettings(
            page_size_tokens=PAGE,
            full_pages=PAGES,
            sliding_pages=PAGES,
            window_tokens=128,
            max_context_tokens=PAGES * PAGE,
            vocab_size=model.config.vocab_size,
            chunk_tokens=SIZES[-1],
            layer_groups=layer_groups,
            overlap=True,
            chunk_graph_tokens=SIZES,
        )
        self.cache = PagedKvCache(
            model.config,
            full_pages=PAGES,
            sliding_pages=PAGES,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self.poison()
        self.runtime = CudaRuntime(torch.device("cuda"))
        self.graphs = ChunkGraphs(model, self.cache, self.runtime, self.settings)
        self.memory = StepMemory(self.runtime, 1, 0, input_words(self.settings))
        generator = torch.Generator().manual_seed(3)
        self.tables = [torch.randperm(PAGES, generator=generator).tolist() for _ in range(2)]

    def poison(self) -> None:
        """Nothing is known of any page."""
        for group in ("full", "sliding"):
            self.cache.memory(group).fill_(50.0)

    def pages(self) -> list[Tensor]:
        """A copy of both groups."""
        return [self.cache.memory(group).clone() for group in ("full", "sliding")]

    def work(self, start: int, count: int, seed: int = 0) -> Work:
        """A chunk of a prompt of its own."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 199_998, (start + count + 1,), generator=generator).tolist()
        sequence = Sequence(EngineRequest("r", 1, RequestKind.PREFILL_ONLY, tuple(tokens)), 0, 0.0)
        sequence.pages = PageTable(list(self.tables[0]), list(self.tables[1]), 0)
        return Work(sequence, start, count, samples=False, chunk=0)

    def replay(self, work: Work, parts: list[int] | None = None) -> Tensor:
        """The hidden state of the chunk's last token."""
        host = self.memory.take()
        issue = self.graphs.prepare(work, host, None if parts is None else parts.append)
        hidden: list[Tensor] = []
        host.in_use = self.runtime.submit(lambda: hidden.append(issue().clone()))
        host.in_use.wait()
        host.in_use = None
        return hidden[0]

    def eager(self, size: int) -> Tensor:
        """The same padded batch as was replayed last, launch by launch."""
        batch = self.graphs.batch(size)
        with torch.inference_mode():
            hidden = self.model.forward(batch, self.cache)
        last = int(batch.full.query_start[-1]) - 1
        return hidden[last : last + 1].clone()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device meanwhile is an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layer_groups", [1, 2])
def test_a_replayed_chunk_is_the_eager_one_bit_for_bit(model: CudaTransformer, layer_groups: int) -> None:
    """Over every road of the experts, padded and not, at the prompt's beginning and behind a prefix."""
    chunks = Chunks(model, layer_groups)
    chunks.replay(chunks.work(0, SIZES[-1], seed=9))  # leaves something of its own in all memory
    for start in (0, 256, 901):
        for count in (1, 2, 63, 64, 65, 200, 256, 400, 512, 700, 1023, 1024, 1025, 2047, 2048):
            size = min(size for size in SIZES if size >= count)
            work = chunks.work(start, count)
            parts: list[int] = []
            chunks.poison()
            # What stands before the chunk is random, and the same for both.
            torch.manual_seed(start)
            for group, table in zip(("full", "sliding"), chunks.tables, strict=True):
                memory = chunks.cache.memory(group)
                for page in table[: -(-start // PAGE)]:
                    memory[page].normal_()
            before = chunks.pages()
            hidden = chunks.replay(work, parts)
            replayed = chunks.pages()
            assert parts == list(range(layer_groups))
            for group, memory in zip(("full", "sliding"), before, strict=True):
                chunks.cache.memory(group).copy_(memory)
            expected = chunks.eager(size)
            assert not same(replayed, before)
            assert same(replayed, chunks.pages()), (start, count)
            assert bool(expected.isfinite().all())
            assert same([hidden], [expected]), (start, count)


def test_nothing_behind_the_chunk_is_written(model: CudaTransformer) -> None:
    chunks = Chunks(model)
    chunks.replay(chunks.work(0, 130))
    for group, table in zip(("full", "sliding"), chunks.tables, strict=True):
        memory = chunks.cache.memory(group)
        written = memory[table[:3]].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # [layers, G, 2, positions, D]
        assert bool((written[..., 130:, :] == 50.0).all())
        assert not bool((written[..., :130, :] == 50.0).all(-1).any())
        others = [page for page in range(memory.shape[0]) if page not in table[:3]]
        assert bool((memory[others] == 50.0).all())


def test_padding_moves_results_by_what_rounding_does(model: CudaTransformer) -> None:
    """Against the same chunk in a batch of its own length: products may be cut differently."""
    chunks = Chunks(model)
    work = chunks.work(0, 700)
    chunks.replay(work)
    padded = chunks.pages()
    chunks.poison()
    batch = chunks.graphs.batch(1024)
    exact = replace(
        batch,
        token_ids=batch.token_ids[:700],
        positions=batch.positions[:700],
        full=replace(batch.full, slot=batch.full.slot[:700]),
        sliding=replace(batch.sliding, slot=batch.sliding.slot[:700]),
    )
    with torch.inference_mode():
        model.forward(exact, chunks.cache)
    errors = [
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(padded, chunks.pages(), strict=True)
    ]
    print(f"pages of a padded chunk against an exact one: {errors}")
    # A random model amplifies any rounding from layer to layer; other pages or slots give more than 1.
    assert max(errors) <= 0.5
    chunks.poison()
    with torch.inference_mode():
        model.forward(exact, chunks.cache)
    one, other = chunks.cache.layer(0).float(), padded[1][:, 0].float()
    first = ((one - other).norm() / one.norm()).item()
    print(f"of the first layer: {first:.1e}")
    # What is padded to 1024 takes FP8 projections, where there are some, and 700 tokens do not.
    assert first <= (4e-2 if model.chunks.fp8_projections else 0.005)


def test_a_longer_eager_chunk_between_two_replays_changes_nothing(model: CudaTransformer) -> None:
    """Buffers grow for it; those which the graphs hold must stay."""
    chunks = Chunks(model)
    work = chunks.work(0, 1024)
    first, pages = chunks.replay(work), chunks.pages()
    tokens = 2 * SIZES[-1]
    long = chunks.graphs.batch(SIZES[-1])
    grown = replace(
        long,
        token_ids=long.token_ids.repeat(2),
        positions=torch.arange(tokens, device="cuda"),
        full=replace(long.full, slot=torch.full((tokens,), -1, device="cuda")),
        sliding=replace(long.sliding, slot=torch.full((tokens,), -1, device="cuda")),
    )
    with torch.inference_mode():
        model.forward(grown, chunks.cache)
    ballast = torch.full((2**28,), 255, dtype=torch.uint8, device="cuda")  # takes what was freed
    chunks.poison()
    assert same([chunks.replay(work)], [first])
    assert same(chunks.pages(), pages)
    assert bool((ballast == 255).all())


def test_nothing_waits_for_the_device_while_a_chunk_is_issued(model: CudaTransformer) -> None:
    chunks = Chunks(model)
    host = chunks.memory.take()
    with no_waiting():
        issue = chunks.graphs.prepare(chunks.work(0, 1000), host, None)
        hidden: list[Tensor] = []
        completion = chunks.runtime.submit(lambda: hidden.append(issue()))
    completion.wait()
    assert bool(hidden[0].isfinite().all())


def test_captured_chunks_take_no_more_memory_than_is_planned(model: CudaTransformer) -> None:
    """The bound of ``cluster.layout_check``; what the driver takes for the graphs themselves is not seen."""
    Chunks(model)  # compiles, loads libraries and reserves the experts' buffers
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cache = 2 * (PAGES + 1) * 2 * 8 * 2 * PAGE * 64 * 2
    before = torch.cuda.memory_reserved()
    kept = Chunks(model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - before - cache
    config = model.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    planned = SIZES[-1] * (4 * config.hidden_size + 2 * heads * config.head_dim) * 2
    print(f"captured chunks took {taken / 2**20:.0f} MiB, {planned / 2**20:.0f} planned")
    assert taken <= planned + 64 * 2**20  # a library's workspace, and whole blocks of the allocator
    assert kept.graphs.largest == SIZES[-1]
