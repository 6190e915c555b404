"""A synthesized model on a device and the engine around it, ready to be timed."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace

import torch
import triton

from antiphon.benchmarks.records import Layout, Record, checkout_commit, now
from antiphon.configs.workers import standard_graphed_chunks
from antiphon.engine.loop import EngineLoop
from antiphon.engine.settings import EngineSettings
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import LanguageModel
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import AntiphonError

PAGE = 64
TEXT_TOKENS = 199_998
"""Ids below this are text."""


class BenchmarkError(AntiphonError):
    """The engine did not do what was to be timed."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A model on a device, ready to be timed."""

    name: str
    model: LanguageModel
    device: torch.device
    kv_dtype: torch.dtype
    resident_fp8: bool
    """Long chunks read experts in FP8 that lie beside the 4-bit ones."""

    def settings(
        self,
        *,
        sequences: int,
        tokens: int,
        chunk: int = PAGE,
        graphs: bool,
        chunk_graphs: bool = False,
        prefix_cache: bool = False,
    ) -> EngineSettings:
        """An engine for so many sequences of so many tokens each.

        Args:
            chunk_graphs: chunks are replayed, as by a worker that is not configured otherwise.
        """
        pages = -(-tokens // PAGE) + 2
        window = -(-(self.model.config.sliding_window + max(chunk, PAGE)) // PAGE) + 2
        return EngineSettings(
            page_size_tokens=PAGE,
            full_pages=sequences * pages,
            sliding_pages=sequences * min(pages, window) + window,
            window_tokens=self.model.config.sliding_window,
            max_context_tokens=self.model.config.max_context_tokens,
            vocab_size=self.model.config.vocab_size,
            prefix_cache=prefix_cache,
            chunk_tokens=chunk,
            max_batch_size=sequences,
            max_reservations_waiting=sequences,
            headroom_tokens=PAGE,
            overlap=True,
            decode_graphs=graphs,
            chunk_graph_tokens=standard_graphed_chunks(chunk) if chunk_graphs else (),
        )

    def engine(self, settings: EngineSettings) -> EngineLoop:
        """An engine whose whole cache holds random keys and values."""
        loop = EngineLoop(self.model, settings, device=self.device, kv_dtype=self.kv_dtype)
        loop.kv_cache.randomise()
        return loop

    def record(
        self, kind: str, value_ms: float, floor_ms: float, extra: dict[str, object], **point: int
    ) -> Record:
        """What is kept of a figure.

        Args:
            kind: BENCH_DECODE or BENCH_PREFILL. point: batch, input_tokens, context, as they apply.
        """
        cuda = self.device.type == "cuda"
        return Record(
            bench=kind,
            model=self.name,
            layout=Layout().name,
            device=torch.cuda.get_device_name(self.device) if cuda else "CPU",
            commit=checkout_commit(),
            date=now(),
            value=round(value_ms, 4),
            unit="ms",
            floor=round(floor_ms, 4),
            extra={**extra, "torch": torch.__version__, "triton": triton.__version__},
            batch=point.get("batch"),
            input_tokens=point.get("input_tokens"),
            context=point.get("context"),
        )

    def prompt(self, tokens: int, seed: int) -> tuple[int, ...]:
        """Random text."""
        most = min(TEXT_TOKENS, self.model.config.vocab_size)
        return tuple(random.Random(seed).choices(range(most), k=tokens))


def make_bench(
    name: str, device: torch.device, resident_fp8: bool = False, chunks: ChunkChoices | None = None
) -> Bench:
    """A synthesized model: the fast one on a GPU, the plain one in float32 on a CPU."""
    config = preset(name)
    parameters = synthesize_parameters(config, 0, device)
    if device.type == "cuda":
        fast = CudaTransformer(config, parameters, device, resident_fp8=resident_fp8, chunks=chunks)
        return Bench(name, fast, device, torch.bfloat16, resident_fp8)
    model = Transformer(config, torch.float32, device)
    fill(model, parameters)
    return Bench(name, model, device, torch.float32, resident_fp8=False)


def sharing(bench: Bench, resident_fp8: bool, chunks: ChunkChoices | None = None) -> Bench:
    """The same weights with or without their FP8 form, or multiplied otherwise; nothing is made anew.

    Raises:
        ValueError: the model's road has one way to multiply.
    """
    if not isinstance(bench.model, CudaTransformer):
        raise ValueError(f"{bench.name}: this model has one way to multiply")
    twin = bench.model.sharing(resident_fp8, chunks or ChunkChoices())
    return replace(bench, model=twin, resident_fp8=resident_fp8)


def free_memory() -> None:
    """The engine of the point before, and its pages, must be gone before the next one takes its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
