"""The overlapped engine with captured steps on a real GPU, against the plain engine and the plain sampler."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.engine.batch import Work
from antiphon.engine.batch_rows import BatchRows
from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import CudaRuntime
from antiphon.engine.device_sampler import DeviceSampler
from antiphon.engine.events import PagesReserved, SequenceFinished, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sampler import Choice, SamplingRow, sample
from antiphon.engine.sequence import Sequence
from antiphon.engine.settings import EngineSettings
from antiphon.engine.step_memory import StepMemory
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.protocol.messages import FinishReason, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, VOCABULARY = 64, 201_088


@pytest.fixture(scope="module")
def model() -> CudaTransformer:
    config = replace(preset("gpt-oss-20b"), num_hidden_layers=4)
    return CudaTransformer(config, synthesize_parameters(config, 0, "cuda"))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device meanwhile is an error."""
    try:
        with warnings.catch_warnings():
            # Said once, after the mode was set: as an error it would leave the mode on for other tests.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class WatchedExecutor(DeviceExecutor):
    """May not wait while a step is launched, once everything was compiled."""

    watched = False

    def launch(self, work: Any, on_layer_group: Any = None) -> Any:
        """See ``DeviceExecutor``."""
        if not self.watched:
            return super().launch(work, on_layer_group)
        with no_waiting():
            return super().launch(work, on_layer_group)


def settings(**changes: Any) -> EngineSettings:
    base = EngineSettings(
        page_size_tokens=PAGE,
        full_pages=160,
        sliding_pages=96,
        window_tokens=128,
        max_context_tokens=4096,
        vocab_size=VOCABULARY,
        chunk_tokens=256,
        max_batch_size=8,
        headroom_tokens=PAGE,
    )
    return replace(base, **changes)


def engine(model: CudaTransformer, *, fast: bool, full_fp8: bool = False, **changes: Any) -> EngineLoop:
    pages: dict[str, Any] = {"device": "cuda", "kv_dtype": torch.bfloat16, "full_fp8": full_fp8}
    if not fast:
        return EngineLoop(model, settings(**changes), **pages)
    captured = settings(overlap=True, decode_graphs=True, **changes)
    return EngineLoop(model, captured, executor=WatchedExecutor, **pages)


def request(name: str, length: int, kind: RequestKind, max_tokens: int, **sampling: Any) -> EngineRequest:
    prompt = torch.randint(0, 199_998, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    params = SamplingParams(
        max_tokens=max_tokens,
        **{"seed": length, "temperature": 0.0, "ignore_eos": True, **sampling},  # type: ignore[arg-type]
    )
    return EngineRequest(name, 1, kind, tuple(prompt), sampling=params)


def run(loop: EngineLoop, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Everybody's tokens; reservations are taken for written as they are."""
    said: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for each in requests:
        loop.submit(each)
    while loop.has_work():
        for event in loop.step():
            if isinstance(event, PagesReserved) and event.kv_tokens > event.cached_tokens:
                loop.kv_ready(event.request_id, event.attempt)
            elif isinstance(event, TokensSampled):
                said[event.request_id] += event.token_ids
            elif isinstance(event, SequenceFinished):
                assert event.reason is FinishReason.LENGTH, event.error
    loop.check_pages()
    return said


@pytest.mark.parametrize(("batch", "full_fp8"), [(1, False), (4, False), (8, False), (1, True), (8, True)])
def test_overlapped_graphs_say_what_the_plain_engine_says(
    model: CudaTransformer, batch: int, full_fp8: bool
) -> None:
    """Equal lengths, so that both compute the same batches, which have graphs of their own size."""
    requests = [request(f"r{i}", 200 + i, RequestKind.COLOCATED, 40) for i in range(batch)]
    small = {"chunk_tokens": 4096, "full_pages": 160, "sliding_pages": 160, "full_fp8": full_fp8}
    expected = run(engine(model, fast=False, **small), requests)
    loop = engine(model, fast=True, **small)
    first = run(loop, requests)
    loop = engine(model, fast=True, **small)
    assert run(loop, requests) == first, "the same tokens, bit for bit, from run to run"
    same = sum(a == b for name in expected for a, b in zip(expected[name], first[name], strict=True))
    total = batch * 40
    print(f"batch {batch}: {same} of {total} tokens equal the plain engine's")
    assert same == total
    assert len({token for tokens in first.values() for token in tokens}) > 4


def test_mixed_ways_of_sampling_and_lengths_end_well(model: CudaTransformer) -> None:
    styles: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_logprobs": 5},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.05},
        {"temperature": 0.7, "frequency_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": (5, 6), "logit_bias": ((9, 3.0),)},
        {"temperature": 3.0, "top_p": 0.999},
    ]
    requests = [
        request(f"r{i}", 30 + 61 * i, RequestKind.COLOCATED, 10 + 7 * i, **style)
        for i, style in enumerate(styles)
    ]
    said = run(engine(model, fast=True), requests)
    assert [len(said[r.request_id]) for r in requests] == [10 + 7 * i for i in range(len(styles))]
    assert said == run(engine(model, fast=True), requests), "the same tokens from run to run"


def test_nothing_waits_for_the_device_while_steps_are_launched(model: CudaTransformer) -> None:
    loop = engine(model, fast=True, prefix_cache=False)
    requests = [
        request(f"r{i}", 129, RequestKind.REMOTE_KV, 60, temperature=1.0, top_p=0.9 if i % 2 else 1.0)
        for i in range(8)
    ]
    run(loop, [replace(each, request_id=f"warm {each.request_id}") for each in requests])
    assert isinstance(loop.executor, WatchedExecutor)
    loop.executor.watched = True
    said = run(loop, requests)
    assert all(len(tokens) == 60 for tokens in said.values())


def _choose(logits: torch.Tensor, rows: list[dict[str, Any]]) -> tuple[list[Choice], list[Choice]]:
    """What the device chooses, and what the plain sampler does on the same logits on the CPU."""
    runtime = CudaRuntime(torch.device("cuda"))
    memory = StepMemory(runtime, len(rows), 0)
    sampler, order = DeviceSampler(memory, VOCABULARY), BatchRows()
    sequences = []
    for i, more in enumerate(rows):
        params = SamplingParams(max_tokens=9, **{"seed": i, **more})  # type: ignore[arg-type]
        each = EngineRequest(f"s{i}", 1, RequestKind.COLOCATED, (1,), sampling=params)
        sequences.append(Sequence(each, i, 0.0))
    work = [Work(sequence, 0, 1, True) for sequence in sequences]
    assigned = np.array(order.assign(sequences))
    sampling = sampler.prepare(work, assigned, order.version, memory.take())
    on_device = logits.cuda()

    def issue() -> None:
        sampling.send()
        sampling.fetch(sampling.choose(on_device))

    got = sampling.read(runtime.submit(issue))
    definition = sample(logits, [SamplingRow(s.request.sampling, ()) for s in sequences])  # type: ignore[arg-type]
    return got, definition


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0, "top_logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.7, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 0.5, "top_p": 0.8},
    ],
)
def test_the_device_chooses_as_the_plain_sampler_does(more: dict[str, Any]) -> None:
    rows = 128
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    logits = logits.bfloat16().float()  # with the ties that real logits have
    got, expected = _choose(logits, [more] * rows)
    decided = [(a, b) for a, b in zip(got, expected, strict=True) if not a.undecided]
    different = sum(a.token_id != b.token_id for a, b in decided)
    print(f"{more}: {different} of {len(decided)} choices differ, {rows - len(decided)} left open")
    # Exponentials may differ in their last bit, which moves a draw only at the very edge of a token's share.
    assert different <= (0 if more["temperature"] == 0 else 1)
    assert len(decided) >= rows // 2
    for one, other in decided:
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)


def test_step_time_with_and_without_overlap(model: CudaTransformer) -> None:
    """Printed for whoever reads the run: four layers only, so the host's share is at its largest."""
    for fast in (False, True):
        loop = engine(model, fast=fast)
        for i in range(8):
            loop.submit(request(f"r{i}", 2, RequestKind.COLOCATED, 400, temperature=1.0))
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            loop.step()
            times.append((time.perf_counter() - begin) * 1e3)
        print(f"{'overlapped, graphs' if fast else 'plain, eager'}: {statistics.median(times[50:]):.3f} ms")
