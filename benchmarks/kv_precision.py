"""What FP8 pages cost in precision: attention on random numbers, and gpt-oss-tiny, which can be checked.

Three questions, none of which needs a GPU, for the numbers in the pages do not depend on who writes them:

- Attention over random keys and values of several kinds, with scales of several kinds, against float64.
- gpt-oss-tiny is shown texts, and what it would say next at each position of the answers is compared with
  what it says with float32 pages.
- gpt-oss-tiny answers questions that its training never showed, greedily, through the engine.

Run: ``python -m antiphon.benchmarks.kv_precision``; the page is written by ``make docs``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from antiphon.benchmarks.records import RESULTS, checkout_commit, now
from antiphon.demo.cached_checkpoint import ensure_demo_checkpoint
from antiphon.demo.dataset import held_out_examples
from antiphon.demo.evaluate import evaluate, table
from antiphon.demo.generate import STOPS
from antiphon.demo.harmony import ENCODINGS_VARIABLE
from antiphon.demo.questions import Question, question_of
from antiphon.demo.score import prompt_of
from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.events import SequenceFinished, TokensSampled
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import PageTable
from antiphon.engine.sequence import Sequence as EngineSequence
from antiphon.engine.settings import EngineSettings
from antiphon.kernels.fp8_pages import E4M3_MAX, dequantise, quantise
from antiphon.model.checkpoint.load import load_model
from antiphon.model.transformer import Transformer
from antiphon.protocol.messages import SamplingParams
from antiphon.router.harmony.vocabulary import ranks_path

OUT = RESULTS / "kv_precision.json"
PAGE = 64
HEAD_DIM = 64
MAX_TOKENS = 320
Round = Callable[[Tensor], Tensor]
PAGES: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "fp8_e4m3": (torch.bfloat16, True),
}
"""Kinds of pages: type, and whether full layers hold FP8 instead."""


def _e4m3(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _power_of_two(peak: Tensor) -> Tensor:
    """The smallest with which the peak is at most 448."""
    return torch.exp2(torch.ceil(torch.log2(peak.clamp_min(1e-30) / E4M3_MAX)))


def _per_page(numbers: Tensor) -> Tensor:
    pages = numbers.view(-1, PAGE, HEAD_DIM)
    return _e4m3(pages, pages.abs().amax((1, 2), keepdim=True) / E4M3_MAX).view(numbers.shape)


ROUNDINGS: dict[str, Round] = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "e4m3, no scale": lambda x: _e4m3(x, torch.ones(())),
    "e4m3, one scale a head": lambda x: _e4m3(x, x.abs().amax() / E4M3_MAX),
    "e4m3, a scale a page": _per_page,
    "e4m3, a power of two a token": lambda x: _e4m3(x, _power_of_two(x.abs().amax(-1, keepdim=True))),
    "e4m3, a bfloat16 scale a token": lambda x: dequantise(*quantise(x)),
}


def _random_numbers(kind: str, tokens: int, generator: torch.Generator) -> Tensor:
    """[tokens, D] keys or values of one head."""
    numbers = torch.randn(tokens, HEAD_DIM, generator=generator)
    if kind == "normal":
        return numbers
    if kind == "heavy tails":
        outliers = torch.rand(numbers.shape, generator=generator) < 0.01
        return numbers * torch.where(outliers, 50.0, 1.0)
    if kind == "outlier coordinates":  # the same few of every token, as keys of transformers have them
        return numbers * torch.where(torch.arange(HEAD_DIM) % 21 == 3, 30.0, 1.0)
    if kind == "small":
        return numbers * 1e-3
    return numbers * torch.exp(torch.randn(tokens, 1, generator=generator) * 3.0)  # tokens of all sizes


KINDS = ("normal", "heavy tails", "outlier coordinates", "small", "tokens of all sizes")


def attention_errors(tokens: int = 2048, queries: int = 64, seed: int = 0) -> list[dict[str, object]]:
    """Relative L2 of softmax(q k / 8) v with rounded keys and values, by kind of numbers and of scale.

    Queries are scaled so that the scores of exact keys have a standard deviation of 2.
    """
    found: list[dict[str, object]] = []
    for kind in KINDS:
        generator = torch.Generator().manual_seed(seed)
        key, value = (_random_numbers(kind, tokens, generator) for _ in range(2))
        query = torch.randn(queries, HEAD_DIM, generator=generator)
        query *= 2.0 / (query @ key.T).std()

        def attend(key: Tensor, value: Tensor, query: Tensor = query) -> Tensor:
            return torch.softmax(query.double() @ key.double().T, -1) @ value.double()

        exact = attend(key, value)
        errors = {
            name: float((attend(rounded(key), rounded(value)) - exact).norm() / exact.norm())
            for name, rounded in ROUNDINGS.items()
        }
        found.append({"numbers": kind, "errors": errors})
    return found


def _cache(model: Transformer, pages: str, tokens: int) -> PagedKvCache:
    dtype, full_fp8 = PAGES[pages]
    count = -(-tokens // PAGE)
    return PagedKvCache(
        *(model.config,),
        full_pages=count,
        sliding_pages=count,
        page_size=PAGE,
        dtype=dtype,
        full_fp8=full_fp8,
    )


@torch.inference_mode()
def _next_logits(model: Transformer, pages: str, text: list[int], first: int) -> Tensor:
    """[len(text) - first, V] what follows each position from ``first`` on, in chunks of 128 tokens."""
    cache = _cache(model, pages, len(text))
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    request = EngineRequest("text", 1, RequestKind.COLOCATED, tuple(text), sampling=params)
    sequence = EngineSequence(request, 0, 0.0)
    count = -(-len(text) // PAGE)
    sequence.pages = PageTable(full=list(range(count)), sliding=list(range(count)))
    hidden = []
    for start in range(0, len(text), 128):
        size = min(128, len(text) - start)
        batch = build_forward_batch([Work(sequence, start, size, samples=False)], PAGE, torch.device("cpu"))
        hidden.append(model.forward(batch, cache))
    return model.logits(torch.cat(hidden)[first:])


def teacher_forced(
    model: Transformer, texts: Sequence[tuple[list[int], list[int]]]
) -> dict[str, dict[str, float]]:
    """Agreement with float32 pages over the answers of (prompt, answer) texts, by kind of pages."""
    totals: dict[str, dict[str, float]] = {
        name: {"positions": 0, "same": 0, "squares": 0.0, "exact": 0.0} for name in PAGES
    }
    for prompt, answer in texts:
        text, first = [*prompt, *answer[:-1]], len(prompt) - 1
        exact = _next_logits(model, "float32", text, first)
        for name, total in totals.items():
            logits = exact if name == "float32" else _next_logits(model, name, text, first)
            total["positions"] += len(logits)
            total["same"] += int((logits.argmax(-1) == exact.argmax(-1)).sum())
            total["squares"] += float((logits - exact).double().square().sum())
            total["exact"] += float(exact.double().square().sum())
    return {
        name: {
            "positions": total["positions"],
            "same": total["same"],
            "relative_l2": (total["squares"] / total["exact"]) ** 0.5,
        }
        for name, total in totals.items()
    }


def answers(model: Transformer, pages: str, prompts: Sequence[list[int]], batch: int = 32) -> list[list[int]]:
    """Greedy answers through the engine, stop token included."""
    longest = max(map(len, prompts)) + MAX_TOKENS
    each = -(-longest // PAGE)
    settings = EngineSettings(
        page_size_tokens=PAGE,
        full_pages=batch * each,
        sliding_pages=batch * each,
        window_tokens=model.config.sliding_window,
        max_context_tokens=longest,
        vocab_size=model.config.vocab_size,
        max_batch_size=batch,
        max_queued_requests=len(prompts),
    )
    dtype, full_fp8 = PAGES[pages]
    loop = EngineLoop(model, settings, kv_dtype=dtype, full_fp8=full_fp8)
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, stop_token_ids=tuple(STOPS))
    for number, prompt in enumerate(prompts):
        loop.submit(EngineRequest(str(number), 1, RequestKind.COLOCATED, tuple(prompt), sampling=params))
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in _events(loop, len(prompts)):
        if isinstance(event, TokensSampled):
            outputs[int(event.request_id)] += event.token_ids
        elif event.stop_token_id is not None:
            outputs[int(event.request_id)].append(event.stop_token_id)
    return outputs


def _events(loop: EngineLoop, requests: int) -> Iterator[TokensSampled | SequenceFinished]:
    open_requests = requests
    while open_requests:
        for event in loop.step():
            if isinstance(event, SequenceFinished):
                open_requests -= 1
                yield event
            elif isinstance(event, TokensSampled):
                yield event


def _with_stop(output: list[int]) -> list[int]:
    """Up to the first stop token, once."""
    end = next((i for i, token in enumerate(output) if token in STOPS), len(output))
    return output[: end + 1]


def scores(
    model: Transformer, pages: str, questions: Sequence[Question]
) -> tuple[dict[str, tuple[int, int]], list[list[int]]]:
    """(right, total) by skill, and the answers."""
    outputs: list[list[int]] = []

    def ask(asked: Sequence[Question]) -> list[list[int]]:
        outputs.extend(_with_stop(output) for output in answers(model, pages, [prompt_of(q) for q in asked]))
        return outputs

    verdicts = evaluate(questions, ask)
    return {name: (score.right, score.total) for name, score in table(verdicts).items()}, outputs


def measure(per_skill: int, texts: int) -> dict[str, object]:
    """Everything, as it is written to the file."""
    os.environ.setdefault(ENCODINGS_VARIABLE, str(ranks_path().parent))
    model = load_model(ensure_demo_checkpoint(), torch.float32)
    questions = [question_of(example) for example in held_out_examples(1, per_skill)]
    found = {pages: scores(model, pages, questions) for pages in ("bfloat16", "fp8_e4m3")}
    plain, fp8 = (found[pages][1] for pages in ("bfloat16", "fp8_e4m3"))
    step = max(1, len(questions) // texts)
    shown = [(prompt_of(q), plain[i]) for i, q in enumerate(questions) if i % step == 0 and plain[i]]
    return {
        "bench": "kv_precision",
        "model": "gpt-oss-tiny",
        "commit": checkout_commit(),
        "date": now(),
        "attention": attention_errors(),
        "teacher_forced": {"texts": len(shown), "pages": teacher_forced(model, shown)},
        "scores": {pages: right for pages, (right, _) in found.items()},
        "same_answers": sum(a == b for a, b in zip(plain, fp8, strict=True)),
        "answers": len(plain),
    }


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-skill", type=int, default=40, help="questions of each skill")
    parser.add_argument("--texts", type=int, default=120, help="texts that are shown")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    figures = measure(options.per_skill, options.texts)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
