"""Where the time from a prompt to its first token goes, with its chunks replayed and issued launch by launch.

For each prompt the same engine is run with captured chunks and without. What both leave in the pages is
compared, and every step is split: the host's time from its first launch to its last, and the device's between
events before the first and after the last.

Run: ``python -m antiphon.benchmarks.prefill_chunks --models gpt-oss-20b,gpt-oss-120b --prompts 1024,8192``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from antiphon.benchmarks.engine import first_token
from antiphon.benchmarks.engine_model import PAGE, Bench, BenchmarkError, free_memory, make_bench
from antiphon.benchmarks.records import checkout_commit, now
from antiphon.configs.workers import standard_graphed_chunks
from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Completion, CudaRuntime, DeviceRuntime, HostRuntime
from antiphon.engine.loop import EngineLoop

RESIDENT_FP8 = frozenset({"gpt-oss-20b"})
"""Models whose FP8 experts fit beside the 4-bit ones on one card."""
FIRST_LAYER_ERROR, LARGEST_ERROR = 0.005, 0.5
"""Relative L2 of keys and values between chunks padded and not: of the first layer, and of any. Padding may
change how products are cut and so how they round, which a random model amplifies from layer to layer; a wrong
page or slot gives more than 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """One submitted step: milliseconds of the host while it issued, and of the device from the first launch
    to the end of the last, waits for the host included."""

    issue_ms: float
    device_ms: float


class TimedRuntime:
    """A runtime that takes the time of everything submitted; see ``DeviceRuntime``."""

    def __init__(self, inner: DeviceRuntime) -> None:
        self._inner = inner
        self.device = inner.device
        self.host_memory = inner.host_memory
        self.capture = inner.capture
        self.capture_parts = inner.capture_parts
        self._pending: list[tuple[float, list[torch.cuda.Event]]] = []

    def submit(self, issue: Callable[[], None]) -> Completion:
        """Between two events."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (self.device.type == "cuda"))]  # type: ignore[no-untyped-call]
        spent: list[float] = []

        def timed() -> None:
            for mark in marks[:1]:
                mark.record()
            started = time.perf_counter()
            issue()
            spent.append((time.perf_counter() - started) * 1e3)
            for mark in marks[1:]:
                mark.record()

        completion = self._inner.submit(timed)
        self._pending.append((spent[0], marks))
        return completion

    def take(self) -> list[Part]:
        """What was submitted since the last call; all of it must be over."""
        pending, self._pending = self._pending, []
        return [
            Part(issue_ms, float(marks[0].elapsed_time(marks[1])) if marks else issue_ms)
            for issue_ms, marks in pending
        ]


@dataclass(frozen=True, slots=True)
class Split:
    """Medians over the repeats of one prompt length, in milliseconds.

    Attributes:
        total_ms: prompt in to first token out.
        prompt_issue_ms, prompt_device_ms: of the prompt's chunks.
        decode_issue_ms, decode_device_ms: of the first decode step.
    """

    total_ms: float
    prompt_issue_ms: float
    prompt_device_ms: float
    decode_issue_ms: float
    decode_device_ms: float

    @property
    def rest_ms(self) -> float:
        """When the device had nothing of this prompt to do, or had not begun: plans, commits, commands."""
        return self.total_ms - self.prompt_device_ms - self.decode_device_ms


def engine_for(
    bench: Bench, tokens: int, chunk: int, sizes: tuple[int, ...]
) -> tuple[EngineLoop, TimedRuntime]:
    """An engine with zeroed pages, so that two of them can be compared, and its clock."""
    settings = replace(
        bench.settings(sequences=2, tokens=tokens + PAGE, chunk=chunk, graphs=True, prefix_cache=True),
        chunk_graph_tokens=sizes,
    )
    cuda = bench.device.type == "cuda"
    runtime = TimedRuntime(CudaRuntime(bench.device) if cuda else HostRuntime())
    loop = EngineLoop(
        bench.model,
        settings,
        device=bench.device,
        kv_dtype=bench.kv_dtype,
        executor=lambda model, cache, resolved: DeviceExecutor(model, cache, resolved, runtime),
    )
    return loop, runtime


def timed_prompts(loop: EngineLoop, runtime: TimedRuntime, prompts: Sequence[tuple[int, ...]]) -> Split:
    """The medians of all prompts but the first, which warms up."""
    seen: list[Split] = []
    for number, prompt in enumerate(prompts):
        runtime.take()
        begin = time.perf_counter()
        first_token(loop, number, prompt)
        total = (time.perf_counter() - begin) * 1e3
        loop.release(f"p{number}", 1)
        while loop.has_work():
            loop.step()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        # A step with nothing in flight before it is two parts: the forward pass, and the choice of a token.
        *chunks, forward, choice = runtime.take()
        if len(chunks) != -(-(len(prompt) - 1) // loop.settings.chunk_tokens):
            raise BenchmarkError(f"{len(prompt)} tokens were computed in {len(chunks)} chunks and a step")
        seen.append(
            Split(
                total,
                sum(part.issue_ms for part in chunks),
                sum(part.device_ms for part in chunks),
                forward.issue_ms + choice.issue_ms,
                forward.device_ms + choice.device_ms,
            )
        )
    fields = [asdict(split) for split in seen[1:]]
    return Split(**{name: statistics.median(each[name] for each in fields) for name in fields[0]})


def page_errors(one: EngineLoop, other: EngineLoop) -> list[float]:
    """Relative L2 between the pages of two engines that did the same, by layer."""
    layers = range(one.kv_cache.model.num_hidden_layers)
    return [
        _relative(*(cache.numbers(layer) for cache in (one.kv_cache, other.kv_cache))) for layer in layers
    ]


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm().clamp_min(1e-20))


def point(bench: Bench, tokens: int, chunk: int, repeats: int) -> dict[str, object]:
    """One prompt length: with and without captured chunks, compared and split."""
    chunk = min(chunk, -(-tokens // PAGE) * PAGE)
    prompts = [bench.prompt(tokens, number) for number in range(repeats + 1)]
    splits: dict[str, Split] = {}
    loops: list[EngineLoop] = []
    capture_s = 0.0
    for name, sizes in (("eager", ()), ("graphs", standard_graphed_chunks(chunk))):
        begin = time.perf_counter()
        loop, runtime = engine_for(bench, tokens, chunk, sizes)
        capture_s = time.perf_counter() - begin
        splits[name] = timed_prompts(loop, runtime, prompts)
        loops.append(loop)
    errors = page_errors(loops[1], loops[0])
    for name, split in splits.items():
        prompt = f"prompt: host {split.prompt_issue_ms:7.2f} device {split.prompt_device_ms:7.2f}"
        step = f"first step: host {split.decode_issue_ms:5.2f} device {split.decode_device_ms:5.2f}"
        head = f"{bench.name} {tokens:6d} {name:6s} {split.total_ms:8.2f} ms"
        pages = f"pages {errors[0]:.1e} to {max(errors):.1e}"
        print(f"{head} | {prompt} | {step} | rest {split.rest_ms:5.2f} | {pages}", flush=True)
    return {
        "model": bench.name,
        "input_tokens": tokens,
        "chunk_tokens": chunk,
        "repeats": repeats,
        "road": loops[1].executor.road,
        "start_s": capture_s,
        "page_errors": errors,
        "ok": errors[0] <= FIRST_LAYER_ERROR and max(errors) <= LARGEST_ERROR,
        **{name: {**asdict(split), "rest_ms": split.rest_ms} for name, split in splits.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and write the figures; returns 1 when what the chunks left in the pages differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt-oss-20b,gpt-oss-120b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", default="1024,2048,8192")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens per step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    options = parser.parse_args(arguments)
    points = []
    for name in options.models.split(","):
        bench = make_bench(name, torch.device(options.device), name in RESIDENT_FP8)
        for tokens in options.prompts.split(","):
            points.append(point(bench, int(tokens), options.chunk, options.repeats))
            free_memory()
        del bench
        free_memory()
    if options.out is not None:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        figures = {"commit": checkout_commit(), "date": now(), "device": device, "points": points}
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return int(not all(each["ok"] for each in points))


if __name__ == "__main__":
    sys.exit(main())
