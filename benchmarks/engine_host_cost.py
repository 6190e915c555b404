"""What a decode step costs the host, without a model: planning and commit, and the executor's own writing.

The forward pass is a stand-in that returns at once. Times are processor time of the one thread, so that other
work on the machine does not count.

Run: ``python -m antiphon.benchmarks.engine_host_cost``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.executor import Executor, Finished, LaunchedStep
from antiphon.engine.executors import make_executor
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sampler import Choice
from antiphon.engine.settings import EngineSettings
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.forward import ForwardBatch, KvLayers, LanguageModel
from antiphon.protocol.messages import SamplingParams

VOCABULARY = 1024


class InstantModel:
    """Computes nothing; its logits are always the same."""

    def __init__(self, config: GptOssConfig) -> None:
        self.config = config
        self._logits = torch.rand(1, VOCABULARY)

    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """[T, 1] zeros."""
        return torch.zeros(len(batch.token_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V], every row the same."""
        return self._logits.expand(len(hidden), -1)


class InstantExecutor:
    """Chooses token 7 for everybody, so that what remains is planning and commit."""

    road = "nothing is computed"

    def launch(
        self, work: Sequence[Work], on_layer_group: Callable[[int], None] | None = None
    ) -> LaunchedStep:
        """See ``Executor``."""
        return Finished([Choice(7) for item in work if item.samples])


def _instant(model: LanguageModel, kv_cache: PagedKvCache, settings: EngineSettings) -> Executor:
    return InstantExecutor()


def step_cost_us(
    batch: int,
    steps: int = 300,
    *,
    overlap: bool = False,
    executor: Callable[[LanguageModel, PagedKvCache, EngineSettings], Executor] = _instant,
    temperature: float = 1.0,
) -> float:
    """Median processor time of a decode step of ``batch`` sequences, in microseconds."""
    config = preset("tiny")
    settings = EngineSettings(
        page_size_tokens=64,
        full_pages=batch * 16 + 8,
        sliding_pages=batch * 4 + 8,
        window_tokens=128,
        max_context_tokens=1024,
        vocab_size=VOCABULARY,
        chunk_tokens=512,
        max_batch_size=batch,
        overlap=overlap,
        decode_graphs=overlap,
    )
    loop = EngineLoop(InstantModel(config), settings, executor=executor)
    for number in range(batch):
        sampling = SamplingParams(
            max_tokens=1000, seed=number, temperature=temperature, stop_token_ids=(1, 2, 3)
        )
        request = EngineRequest(
            f"r{number}", 1, RequestKind.REMOTE_KV, (number % 50 + 1,), sampling=sampling, deadline_s=600.0
        )
        loop.submit(request)
    while loop.snapshot().running < batch:
        loop.step()
    costs = []
    for _ in range(steps):
        begin = time.thread_time()
        loop.step()
        costs.append((time.thread_time() - begin) * 1e6)
    return statistics.median(costs)


def main() -> None:
    """Print a line per batch size."""
    print("batch   plan + commit   + executor's own work, overlapped (greedy / drawn), us per step")
    for batch in (1, 32, 128):
        plain = step_cost_us(batch)
        drawn, greedy = (
            step_cost_us(batch, overlap=True, executor=make_executor, temperature=temperature)
            for temperature in (1.0, 0.0)
        )
        print(f"{batch:5d}   {plain:13.0f}   {greedy:13.0f} / {drawn:.0f}", flush=True)


if __name__ == "__main__":
    main()
