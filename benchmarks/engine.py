"""Decode steps and prompts through the real engine loop and the serving sampler, on synthesized weights.

Decode is ``engine_decode``. Prefill: prompt in to first token out, as the two halves of a deployment do it:
the prompt but its last token, and a decode step.

Run: ``python -m antiphon.benchmarks.engine --model gpt-oss-20b --batches 1,8,32,128 --prefill 1024,8192``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from antiphon.benchmarks.engine_decode import decode_point, sampling
from antiphon.benchmarks.engine_model import PAGE, Bench, BenchmarkError, free_memory, make_bench
from antiphon.benchmarks.floors import Form, prefill_floor_ms
from antiphon.benchmarks.records import BENCH_PREFILL, RESULTS, Record, append_records
from antiphon.engine.events import EngineEvent, PagesReserved, PrefillComputed, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.model.cuda_roads import ChunkChoices

_Event = TypeVar("_Event", bound=EngineEvent)

LEAST_S = 0.5
"""Of prompts that are timed: of short ones a few would not be typical."""


def prefill_point(
    bench: Bench,
    tokens: int,
    chunk: int,
    repeats: int,
    *,
    chunk_graphs: bool = True,
    choices: str = "",
    enough_s: float = math.inf,
    colocated: bool = False,
) -> Record:
    """Median time from a prompt of ``tokens`` to its first token; the first prompt warms up.

    Args:
        repeats: prompts that are timed; more until all of them took LEAST_S, fewer, but one at least, once
            they took ``enough_s``.
        chunk_graphs: chunks are replayed where the bench captures any, and not issued launch by launch.
        colocated: one request does both parts, so that the chunk's own last row chooses the first token.
        choices: how the model multiplies where that is not the default, in words for the record.
    """
    chunk = min(chunk, -(-tokens // PAGE) * PAGE)
    settings = bench.settings(
        sequences=2,
        tokens=tokens + PAGE,
        chunk=chunk,
        graphs=True,
        chunk_graphs=chunk_graphs,
        prefix_cache=True,
    )
    loop = bench.engine(settings)
    times: list[float] = []
    for number in count():
        took_s = sum(times[1:]) / 1e3
        if len(times) > 1 and (took_s >= enough_s or (len(times) > repeats and took_s >= LEAST_S)):
            break
        prompt = bench.prompt(tokens, number)
        begin = time.perf_counter()
        if colocated:
            params = sampling(1, number)
            loop.submit(EngineRequest(f"c{number}", 1, RequestKind.COLOCATED, prompt, sampling=params))
            _step_until(loop, TokensSampled)
        else:
            first_token(loop, number, prompt)
        times.append((time.perf_counter() - begin) * 1e3)
        if not colocated:
            loop.release(f"p{number}", 1)
        while loop.has_work():
            loop.step()
    form: Form = "fp8" if bench.resident_fp8 else "mxfp4"
    resident = "mxfp4 and fp8" if bench.resident_fp8 else "mxfp4"
    extra: dict[str, object] = {"resident_weights": resident, "chunk_tokens": chunk}
    extra |= {"repeats": len(times) - 1, "road": loop.executor.road}
    extra["graphed_chunk_tokens"] = max(settings.chunk_graph_tokens, default=0)
    if colocated:
        choices = ", ".join(filter(None, (choices, "first token by the chunk itself")))
    if choices:
        extra["choices"] = choices
    floor = prefill_floor_ms(bench.model.config, tokens, form)
    value = statistics.median(times[1:])
    return bench.record(BENCH_PREFILL, value, floor, extra, batch=1, input_tokens=tokens)


def first_token(loop: EngineLoop, number: int, prompt: tuple[int, ...]) -> None:
    """Prefill as a prefill worker does, then the decode step, over the same pages."""
    loop.submit(EngineRequest(f"p{number}", 1, RequestKind.PREFILL_ONLY, prompt))
    _step_until(loop, PrefillComputed)
    params = sampling(1, number)
    loop.submit(EngineRequest(f"d{number}", 1, RequestKind.REMOTE_KV, prompt, sampling=params))
    reserved = _step_until(loop, PagesReserved)
    if reserved.kv_tokens - reserved.cached_tokens >= PAGE:
        raise BenchmarkError(f"only {reserved.cached_tokens} of {reserved.kv_tokens} positions were found")
    if reserved.kv_tokens > reserved.cached_tokens:
        loop.kv_ready(reserved.request_id, reserved.attempt)
    _step_until(loop, TokensSampled)


def _step_until(loop: EngineLoop, kind: type[_Event]) -> _Event:
    while loop.has_work():
        for event in loop.step():
            if isinstance(event, kind):
                return event
    raise BenchmarkError(f"the engine came to rest without {kind.__name__}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _choices(options: argparse.Namespace) -> ChunkChoices | None:
    choices = ChunkChoices(options.fp8_projections, options.expert_tile)
    return None if choices == ChunkChoices() else choices


def in_words(choices: ChunkChoices | None, *, chunk_graphs: bool, resident_fp8: bool = False) -> str:
    """What is not the default, such as ``launched, FP8 projections, tiles of 128``."""
    words = ["FP8 experts"] if resident_fp8 else []
    words += [] if chunk_graphs else ["launched"]
    if choices is not None:
        words += ["FP8 projections"] if choices.fp8_projections else []
        words += [] if choices.expert_tile is None else [f"tiles of {choices.expert_tile}"]
    return ", ".join(words)


def run(bench: Bench, options: argparse.Namespace) -> list[Record]:
    """Every point that was asked for; prints a line for each."""
    records = []
    for context in _numbers(options.contexts):
        for batch in _numbers(options.batches):
            free_memory()
            record = decode_point(bench, batch, context, options.steps)
            records.append(record)
            _say(record, f"decode, batch {batch}, context {context}")
    for tokens in _numbers(options.prefill):
        free_memory()
        record = prefill_point(
            *(bench, tokens, options.chunk, options.repeats),
            chunk_graphs=not options.launched,
            colocated=options.colocated,
            choices=in_words(_choices(options), chunk_graphs=not options.launched),
        )
        records.append(record)
        _say(record, f"prefill, {tokens} tokens")
    return records


def _say(record: Record, what: str) -> None:
    share = 0.0 if record.floor is None else record.floor / record.value
    spread = record.extra.get("expert_spread", "")
    figures = f"{record.value:.3f} ms, floor {record.floor} ({share:.2f}), experts {spread}"
    print(f"{record.model} {what}: {figures}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and append records; returns 1 when a run's experts were not spread as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--contexts", default="8192")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--prefill", default="", help="prompt lengths, such as 1024,8192,32768")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens per step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--colocated", action="store_true", help="prompts whose own chunk gives the token")
    parser.add_argument("--launched", action="store_true", help="issue chunks launch by launch")
    parser.add_argument("--resident-fp8", action="store_true", help="hold FP8 experts for long chunks too")
    parser.add_argument("--fp8-projections", action="store_true", help="the attention's, of long chunks")
    parser.add_argument("--expert-tile", type=int, help="tokens of an expert's tile in long chunks")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine.json")
    options = parser.parse_args(arguments)
    bench = make_bench(options.model, torch.device(options.device), options.resident_fp8, _choices(options))
    records = run(bench, options)
    append_records(options.out, records)
    return int(any(record.extra.get("ok") is False for record in records))


if __name__ == "__main__":
    sys.exit(main())
