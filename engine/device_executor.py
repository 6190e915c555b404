"""Computes and samples steps on a device while the host goes on: nothing here waits before ``result``.

A step's tokens stay on the device for the step that follows; the host gets a copy of them later. Which steps
are replayed as graphs is decided here once: all that only decode, and all that are one chunk of a prompt,
when there are such graphs; the latter up to the largest size that was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from antiphon.engine.batch import Work, build_host_batch
from antiphon.engine.batch_rows import BatchRows
from antiphon.engine.chunk_graphs import ChunkGraphs, input_words
from antiphon.engine.decode_graphs import DecodeGraphs, table_pages
from antiphon.engine.device_runtime import Captured, Completion, DeviceRuntime, runtime_for
from antiphon.engine.device_sampler import DeviceSampler, StepSampling
from antiphon.engine.executor import Finished, LaunchedStep, grammars, layer_hook
from antiphon.engine.grammar import step_masks
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.sampler import Choice
from antiphon.engine.settings import EngineSettings
from antiphon.engine.step_memory import HostMemory, StepMemory
from antiphon.model.forward import LanguageModel

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Launched:
    """A step that was submitted."""

    completion: Completion
    host: HostMemory
    read: Callable[[Completion], list[Choice]]
    sample: Callable[[], tuple[Completion, Callable[[Completion], list[Choice]]]] | None = None
    """Submits the choice of tokens, which waits for a grammar; what to wait for and to read then."""

    def go_on(self) -> None:
        """See ``LaunchedStep``."""
        if self.sample is not None:
            self.completion, self.read = self.sample()
            self.host.in_use, self.sample = self.completion, None

    def result(self) -> list[Choice]:
        """See ``LaunchedStep``; once."""
        choices = self.read(self.completion)
        self.host.in_use = None
        return choices


class DeviceExecutor:
    """See ``executor.Executor``; at most two steps may be launched and not waited for.

    Args:
        runtime: the device's; a stand-in in tests.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: PagedKvCache,
        settings: EngineSettings,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._runtime = runtime or runtime_for(kv_cache.device)
        self._layer_hook = layer_hook(kv_cache, settings.layer_groups)
        rows, limit = settings.max_batch_size, settings.max_sequence_tokens
        entries = 2 * rows * table_pages(limit, kv_cache.page_size) if settings.decode_graphs else 0
        self._memory = StepMemory(self._runtime, rows, entries, input_words(settings))
        self._rows = BatchRows()
        self._sampler = DeviceSampler(self._memory, settings.vocab_size)
        self._graphs = (
            DecodeGraphs(model, kv_cache, self._runtime, self._memory, limit)
            if settings.decode_graphs
            else None
        )
        self._chunks = (
            ChunkGraphs(model, kv_cache, self._runtime, settings) if settings.chunk_graph_tokens else None
        )

    @property
    def road(self) -> str:
        """See ``Executor``."""
        graphed = [] if self._graphs is None else ["decode steps"]
        if self._chunks is not None:
            graphed.append(f"chunks up to {self._chunks.largest} tokens")
        if not graphed:
            return "eager forward pass, sampled on the device"
        return f"{' and '.join(graphed)} as graphs, others eager, sampled on the device"

    def launch(
        self, work: Sequence[Work], on_layer_group: Callable[[int], None] | None = None
    ) -> LaunchedStep:
        """See ``Executor``."""
        if not work:
            return Finished([])
        sampled = [item for item in work if item.samples]
        host = self._memory.take()
        # A token that is not known yet was sampled by the step before, in the row its sequence had there.
        before = self._rows.row_of
        sources = [
            -1 if item.start < len(item.sequence.token_ids) else before[item.sequence] for item in work
        ]
        if not sampled:
            forward = self._prepare(work, _NO_ROWS, sources, host, on_layer_group)
            host.in_use = self._runtime.submit(lambda: _ignore(forward()))
            return _Launched(host.in_use, host, _nothing)
        rows = np.array(self._rows.assign([item.sequence for item in sampled]), dtype=np.int64)
        graphs = self._graphs
        if graphs is None or not len(sampled) == len(work) == sum(item.count for item in work):
            forward = self._prepare(work, rows, sources, host, on_layer_group)
            return self._launch_forward_first(forward, sampled, rows, host, None)
        replay = graphs.prepare(work, rows, np.array(sources, dtype=np.int64), host)
        if self._memory.step_in_flight:
            return self._launch_at_once(replay, work, rows, host, graphs)

        def send_and_replay() -> Tensor:
            self._memory.send_for_forward(host)
            return replay()

        return self._launch_forward_first(send_and_replay, work, rows, host, graphs)

    def _launch_forward_first(
        self,
        forward: Callable[[], Tensor],
        sampled: Sequence[Work],
        rows: np.ndarray,
        host: HostMemory,
        graphs: DecodeGraphs | None,
    ) -> LaunchedStep:
        """Have the device compute, and write meanwhile what the choice of tokens needs."""
        hidden: list[Tensor] = []
        host.in_use = self._runtime.submit(lambda: hidden.append(forward()))
        sampling = self._sampler.prepare(sampled, rows, self._rows.version, host)
        if any(item.sequence.grammar is not None for item in sampled):
            return self._waiting(sampling, hidden, host.in_use, host, sends=True)
        tail = None if graphs is None else graphs.tail(len(sampled), sampling.wishes)
        host.in_use = self._runtime.submit(partial(self._choose, sampling, hidden, tail, sends=True))
        return _Launched(host.in_use, host, sampling.read)

    def _launch_at_once(
        self,
        replay: Callable[[], Tensor],
        work: Sequence[Work],
        rows: np.ndarray,
        host: HostMemory,
        graphs: DecodeGraphs,
    ) -> LaunchedStep:
        """Behind a step on its way nothing waits for the host: one copy brings all that is read."""
        sampling = self._sampler.prepare(work, rows, self._rows.version, host)
        constrained = any(item.sequence.grammar is not None for item in work)
        tail = None if constrained else graphs.tail(len(work), sampling.wishes)
        hidden: list[Tensor] = []

        def issue() -> None:
            self._memory.send_inputs(host)
            hidden.append(replay())
            if not constrained:
                self._choose(sampling, hidden, tail, sends=False)

        host.in_use = self._runtime.submit(issue)
        if constrained:
            return self._waiting(sampling, hidden, host.in_use, host, sends=False)
        return _Launched(host.in_use, host, sampling.read)

    def _choose(
        self, sampling: StepSampling, hidden: list[Tensor], tail: Captured | None, *, sends: bool
    ) -> None:
        """Issue the choice from the hidden states of a step; ``sends`` what it reads, too."""
        if sends:
            sampling.send()
        if tail is not None:
            tail.replay()
            sampling.fetch(tail.output[: len(sampling.work)])
        else:
            sampling.fetch(sampling.choose_from(self._model, hidden[0]))

    def _waiting(
        self,
        sampling: StepSampling,
        hidden: list[Tensor],
        completion: Completion,
        host: HostMemory,
        *,
        sends: bool,
    ) -> LaunchedStep:
        """Choose once the tokens before are known, and with them what the grammars allow.

        The host reads those tokens and finds the masks while the device computes this step.
        """
        constrained = list(grammars(zip(sampling.rows.tolist(), sampling.work, strict=True)))

        def sample() -> tuple[Completion, Callable[[Completion], list[Choice]]]:
            chosen = sampling.constrained(step_masks(constrained))
            return self._runtime.submit(partial(self._choose, chosen, hidden, None, sends=sends)), chosen.read

        return _Launched(completion, host, sampling.read, sample)

    def _prepare(
        self,
        work: Sequence[Work],
        rows: np.ndarray,
        sources: list[int],
        host: HostMemory,
        on_layer_group: Callable[[int], None] | None,
    ) -> Callable[[], Tensor]:
        """What issues a step that computes part of a prompt; it returns as ``_prepare_eager`` does."""
        one_chunk = len(work) == 1 and sources[0] < 0
        if self._chunks is not None and one_chunk and work[0].count <= self._chunks.largest:
            return self._chunks.prepare(work[0], host, on_layer_group)
        return self._prepare_eager(work, rows, sources, on_layer_group)

    def _prepare_eager(
        self,
        work: Sequence[Work],
        rows: np.ndarray,
        sources: list[int],
        on_layer_group: Callable[[int], None] | None,
    ) -> Callable[[], Tensor]:
        """What issues a step of any shape; it returns hidden states [M, H] of the sampled tokens, by row."""
        batch = build_host_batch(work, self._kv_cache.page_size)
        last = batch.query_start[1:].astype(np.int64) - 1
        wanted = np.empty(len(rows), dtype=np.int64)
        wanted[rows] = last[[item.samples for item in work]]
        later = np.array(
            [[last[i], source] for i, source in enumerate(sources) if source >= 0], dtype=np.int64
        )
        after_layer = None if on_layer_group is None else self._layer_hook(on_layer_group)

        def forward() -> Tensor:
            on_device = batch.to(self._runtime.device)
            if len(later):
                places, taken = self._memory.send(later.T.copy())
                on_device.token_ids.index_copy_(0, places, self._memory.sampled.index_select(0, taken))
            hidden = self._model.forward(on_device, self._kv_cache, after_layer)
            return hidden.index_select(0, self._memory.send(wanted)) if len(wanted) else hidden

        return forward


def _ignore(hidden: Tensor) -> None:
    """A step without samples needs its KV only."""


def _nothing(completion: Completion) -> list[Choice]:
    """What a step without samples chose."""
    completion.wait()
    return []
