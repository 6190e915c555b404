"""Whether ranks say what one GPU says: argmax at every position of texts that both are told.

The texts are the demo model's own held-out dialogues, which it was trained for, so that a best token is
rarely a near tie; or, of a published shape with random weights and few layers, random tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.benchmarks.model_step import PAGE, random_cache
from antiphon.benchmarks.rank_process import Rank, measured_layout
from antiphon.cluster.eval_run import SEED, load_encoding
from antiphon.demo.cached_checkpoint import ensure_demo_checkpoint
from antiphon.demo.dataset import held_out_examples
from antiphon.demo.harmony import render
from antiphon.demo.shape import MODEL_NAME
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.load import fill, read_parameters
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.forward import ForwardBatch, LanguageModel
from antiphon.model.parallel.commands import RankModel
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.reduce_limits import limits_of
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer

DECODED = 16
"""Last tokens of a text that are computed one at a time, as decode steps."""
LEAST_SHARE = 0.99
"""Of a trained model's positions."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared."""

    name: str
    config: GptOssConfig
    texts: tuple[Tensor, ...]
    """[T] int64 each, longer than ``DECODED``."""
    counted_from: tuple[int, ...]
    """By text: the first position whose next token the model was trained to say."""
    layers: int

    def parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Whole ones, the same on every rank."""
        if self.name == MODEL_NAME:
            return read_parameters(open_checkpoint(ensure_demo_checkpoint()))
        return synthesize_parameters(self.config, 0, device)


def subject(name: str, *, texts: int = 12) -> Subject:
    """The demo model with its dialogues, or four layers of a published shape."""
    if name == MODEL_NAME:
        config = open_checkpoint(ensure_demo_checkpoint()).config
        load_encoding()
        rendered = [render(example) for example in held_out_examples(SEED, 2)]
        chosen = [each for each in rendered if len(each.token_ids) - each.prompt_tokens > DECODED][:texts]
        found = tuple(torch.tensor(each.token_ids) for each in chosen)
        counted = tuple(each.prompt_tokens - 1 for each in chosen)
        return Subject(name, config, found, counted, config.num_hidden_layers)
    config = replace(preset(name), num_hidden_layers=4)
    tokens = torch.randint(0, min(199_998, config.vocab_size), (1024 + DECODED,))
    return Subject(name, config, (tokens,), (0,), 4)


def single_model(rank: Rank, about: Subject) -> LanguageModel:
    """The whole model on this rank's device."""
    if rank.fast:
        from antiphon.model.cuda_transformer import CudaTransformer

        return CudaTransformer(about.config, about.parameters(rank.device), rank.device)
    plain = Transformer(about.config, torch.float32)
    fill(plain, about.parameters(rank.device))
    return plain


def rank_model(
    rank: Rank,
    layout: ParallelLayout,
    about: Subject,
    resident_fp8: bool = False,
    fused: bool = False,
) -> RankModel:
    """This rank's part."""
    config, communicator = about.config, rank.group.communicator
    parameters = shard_parameters(config, layout, about.parameters(rank.device))
    if rank.fast:
        from antiphon.model.parallel.cuda_transformer import CudaRankTransformer

        return CudaRankTransformer(
            *(config, layout, communicator, parameters, rank.device),
            row_reduce=rank.fused(limits_of(rank.size), config.hidden_size),
            resident_fp8=resident_fp8,
            fused=fused,
        )
    plain = ParallelTransformer(config, layout, communicator, torch.float32)
    fill(plain, parameters)
    return plain


def one_sequence(tokens: Tensor, begin: int, pages: Tensor) -> ForwardBatch:
    """Tokens ``begin ..`` of one sequence whose logical pages are ``pages``."""
    end = begin + tokens.shape[0]
    positions = torch.arange(begin, end, device=tokens.device)
    slot = pages[positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, tokens.shape[0]], dtype=torch.int32, device=tokens.device)
    length = torch.tensor([end], dtype=torch.int32, device=tokens.device)
    sequences = PagedSequences(pages.int()[None], starts, length, slot)
    return ForwardBatch(tokens, positions, sequences, sequences)


@torch.inference_mode()
def choices(model: LanguageModel, text: Tensor, device: torch.device, kv_heads: int | None) -> Tensor:
    """argmax at every position: of one chunk, then of decode steps that are told what to read."""
    tokens = text.to(device)
    prompt, pages = tokens.shape[0] - DECODED, -(-tokens.shape[0] // PAGE)
    cache = random_cache(model, pages, pages, kv_heads, device)
    table = torch.arange(pages, device=device)
    hidden = model.forward(one_sequence(tokens[:prompt], 0, table), cache)
    found = [model.logits(hidden[i : i + 256]).argmax(-1) for i in range(0, prompt, 256)]
    for place in range(prompt, tokens.shape[0]):
        hidden = model.forward(one_sequence(tokens[place : place + 1], place, table), cache)
        found.append(model.logits(hidden).argmax(-1))
    return torch.cat(found)


def agreement(rank: Rank, name: str) -> None:
    """Share of positions with the same argmax as on one GPU, for experts dealt out whole and split.

    On GPUs also with fused launches, which the chunk and every decode step of one text take.

    Raises:
        RuntimeError: fewer than 99 % of a trained model's.
    """
    about = subject(name)
    expected: list[Tensor] = []
    if rank.rank == 0:
        single = single_model(rank, about)
        expected = [choices(single, text, rank.device, None) for text in about.texts]
        del single
        rank.empty_cache()
    failed = []
    ways = (False, True) if rank.fast else (False,)
    for layout, fused in itertools.product(rank.layouts(), ways):
        spread = rank_model(rank, layout, about, fused=fused)
        kv_heads = about.config.num_key_value_heads // rank.size
        found = [choices(spread, text, rank.device, kv_heads) for text in about.texts]
        if rank.rank == 0:
            counted = zip(found, expected, about.counted_from, strict=True)
            equal = [(a == b).float()[begin:] for a, b, begin in counted]
            share = float(torch.cat(equal).mean())
            extra: dict[str, object] = {
                "decode_share": float(torch.cat([each[-DECODED:] for each in equal]).mean()),
                "positions": sum(len(each) for each in equal),
                "layers": about.layers,
            }
            road = getattr(spread, "road", "plain torch")
            rank.note("agreement", name, measured_layout(layout), share, "share", kernel=road, extra=extra)
            failed += [layout.name] if name == MODEL_NAME and share < LEAST_SHARE else []
        del spread
        rank.empty_cache()
    if failed:
        raise RuntimeError(f"{', '.join(failed)}: fewer than {LEAST_SHARE:.0%} of positions agree")
