"""A model whose output depends on every key it should see, and a pair of engines that exchange KV.

The fake model writes (token, position, layer) as the key of each position and reads the keys that a query
sees back from the pages, so a wrong page, a stale page, a wrong slot or a wrong window changes its output.
What it should say is also computed without pages, from the token ids alone: ``FakeModel.expected``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Completion, HostRuntime
from antiphon.engine.events import (
    EngineEvent,
    KvWritten,
    PagesReserved,
    PrefillComputed,
    SequenceFinished,
    TokensSampled,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sampler import SamplingRow, sample
from antiphon.engine.settings import EngineSettings
from antiphon.kernels.reference import PagedSequences, write_kv
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import ForwardBatch, KvLayers, LanguageModel
from antiphon.protocol.messages import SamplingParams

VOCABULARY = 61
WINDOW = 24
PAGE = 16
_MODULUS = 8191


def fake_config(layers: int = 4) -> GptOssConfig:
    """A tiny shape: one kv head of 4 numbers."""
    return GptOssConfig(
        num_hidden_layers=layers,
        num_experts=4,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=WINDOW,
        max_context_tokens=4096,
    )


def _mark(tokens: Tensor, positions: Tensor, layer: int | Tensor) -> Tensor:
    """What one key contributes to a query that sees it; int64."""
    return (tokens * 37 + positions * 101 + layer * 13 + 5) ** 2 % _MODULUS * (positions % 7 + 1)


class FakeModel:
    """See the module's docstring."""

    def __init__(self, config: GptOssConfig | None = None) -> None:
        self.config = config or fake_config()
        self.tokens_computed = 0
        self.batches: list[int] = []
        self.interrupt: Callable[[], None] | None = None
        """Called once in the middle of the next forward pass, as another thread might act then."""

    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write marks, read them back, and return each token's hash as its hidden state."""
        self.tokens_computed += len(batch.token_ids)
        self.batches.append(len(batch.full.kv_len))
        hashes = torch.zeros(len(batch.token_ids), dtype=torch.int64)
        for layer in range(self.config.num_hidden_layers):
            sliding = self.config.is_sliding(layer)
            group = batch.sliding if sliding else batch.full
            pages = kv.layer(layer)
            token, position = batch.token_ids.float(), batch.positions.float()
            key = torch.stack((token, position, torch.full_like(token, layer), token * 0), dim=-1)[:, None, :]
            write_kv(key, -key, pages, group.slot)
            self._read(hashes, group, pages, layer, WINDOW if sliding else None)
            if after_layer is not None:
                after_layer(layer)
            if self.interrupt is not None:
                interrupt, self.interrupt = self.interrupt, None
                interrupt()
        return (hashes % _MODULUS).to(torch.float32)[:, None]

    @staticmethod
    def _read(hashes: Tensor, group: PagedSequences, pages: Tensor, layer: int, window: int | None) -> None:
        starts, lengths = group.query_start.tolist(), group.kv_len.tolist()
        for row, length in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            first_query = length - (end - begin)
            first = 0 if window is None else max(0, first_query - window + 1)
            place = torch.arange(first, length)
            keys = pages[group.block_table[row, place // PAGE].long(), 0, 0, place % PAGE]
            values = pages[group.block_table[row, place // PAGE].long(), 0, 1, place % PAGE]
            assert torch.equal(values, -keys), "a page holds half of a write"
            marks = _mark(keys[:, 0].long(), keys[:, 1].long(), keys[:, 2].long() + layer)
            query = torch.arange(first_query, length)
            seen = place[None, :] <= query[:, None]
            if window is not None:
                seen &= place[None, :] > query[:, None] - window
            hashes[begin:end] += (seen * marks[None, :]).sum(dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, 1] -> [M, V], a fixed scatter of the hash."""
        base = hidden.long()
        ids = torch.arange(self.config.vocab_size)[None, :]
        return ((base * 523 + ids * 1237 + base // 3) % 997).float() / 100.0

    def expected(self, request: EngineRequest, max_sequence_tokens: int = 4096) -> list[int]:
        """All output tokens that the request must end with, computed without any page."""
        assert request.sampling is not None
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        output = list(request.output_token_ids)
        while len(output) < request.sampling.max_tokens and len(tokens) < max_sequence_tokens:
            ids, place = torch.tensor(tokens), torch.arange(len(tokens))
            total = 0
            for layer in range(self.config.num_hidden_layers):
                marks = _mark(ids, place, 2 * layer)
                total += int((marks[-WINDOW:] if self.config.is_sliding(layer) else marks).sum())
            hidden = torch.tensor([[float(total % _MODULUS)]])
            token = sample(self.logits(hidden), [SamplingRow(request.sampling, output)])[0].token_id
            assert token is not None
            tokens.append(token)
            output.append(token)
            if token in request.sampling.stop_token_ids and not request.sampling.ignore_eos:
                break
        return output


def settings(**changes: object) -> EngineSettings:
    """Settings of a small engine."""
    base = EngineSettings(
        page_size_tokens=PAGE,
        full_pages=64,
        sliding_pages=32,
        window_tokens=WINDOW,
        max_context_tokens=4096,
        vocab_size=VOCABULARY,
        chunk_tokens=32,
        max_batch_size=8,
        headroom_tokens=PAGE,
        layer_groups=2,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    kind: RequestKind = RequestKind.COLOCATED,
    attempt: int = 1,
    output: Sequence[int] = (),
    priority: int = 0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    **sampling: object,
) -> EngineRequest:
    """A greedy request of four tokens unless said otherwise."""
    params = SamplingParams(**{"max_tokens": 4, "seed": 7, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return EngineRequest(
        request_id=request_id,
        attempt=attempt,
        kind=kind,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling=None if kind is RequestKind.PREFILL_ONLY else params,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
    )


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt without short repetitions."""
    return tuple((i * i * 7 + i * 3 + salt * 11 + 1) % VOCABULARY for i in range(length))


class LazyRuntime(HostRuntime):
    """A device that begins a step only when somebody waits for it, as late as a real one may."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Callable[[], None]] = []
        self._done = 0

    def submit(self, issue: Callable[[], None]) -> Completion:
        """Remember it."""
        self._waiting.append(issue)
        return _Turn(self, self._done + len(self._waiting))

    @torch.inference_mode()
    def run_until(self, number: int) -> None:
        """Run what was submitted up to the ``number``-th."""
        while self._done < number:
            self._done += 1
            self._waiting.pop(0)()


@dataclass
class _Turn:
    runtime: LazyRuntime
    number: int

    def wait(self) -> None:
        self.runtime.run_until(self.number)


MODES = ("plain", "overlapped", "overlapped late", "graphs late")
"""Ways to run an engine that must all say the same."""


def make_engine(mode: str, model: LanguageModel, engine_settings: EngineSettings, **more: Any) -> EngineLoop:
    """An engine of one of the ``MODES``."""
    if mode == "plain":
        return EngineLoop(model, engine_settings, **more)
    changes: dict[str, Any] = {"overlap": True}
    if mode == "graphs late":
        chunk = engine_settings.chunk_tokens
        changes |= {"decode_graphs": True, "chunk_graph_tokens": tuple({max(2, chunk // 2 + 3), chunk})}
        changes["chunk_graph_tokens"] = tuple(sorted(changes["chunk_graph_tokens"]))
    runtime = LazyRuntime() if mode.endswith("late") else HostRuntime()
    return EngineLoop(
        model,
        replace(engine_settings, **changes),
        executor=lambda *built: DeviceExecutor(*built, runtime),
        **more,
    )


@dataclass
class Transcript:
    """What an engine said about each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    finished: dict[str, SequenceFinished] = field(default_factory=dict)
    events: list[EngineEvent] = field(default_factory=list)

    def take(self, events: Sequence[EngineEvent]) -> None:
        """Add events; a gap or a repeat in a stream, or a second end, is an error at once."""
        for event in events:
            self.events.append(event)
            if isinstance(event, TokensSampled):
                stream = self.tokens.setdefault(event.request_id, [])
                if event.request_id in self.finished:
                    raise AssertionError(f"{event.request_id} spoke after its end")
                start = self.starts.setdefault(event.request_id, event.position)
                if event.position != start + len(stream):
                    raise AssertionError(f"{event.request_id}: position {event.position} is not the next one")
                stream += event.token_ids
            elif isinstance(event, SequenceFinished):
                if event.request_id in self.finished:
                    raise AssertionError(f"{event.request_id} ended twice")
                self.finished[event.request_id] = event

    def of_type(self, kind: type) -> list[EngineEvent]:
        """Events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def run(loop: EngineLoop, transcript: Transcript | None = None, limit: int = 2000) -> Transcript:
    """Step until there is nothing to do."""
    transcript = transcript or Transcript()
    for _ in range(limit):
        if not loop.has_work():
            return transcript
        transcript.take(loop.step())
    raise AssertionError(f"still busy after {limit} steps: {loop.snapshot()}")


def held_pages(loop: EngineLoop) -> Counter[str]:
    """Pages that somebody holds, by group and state."""
    held: Counter[str] = Counter()
    for group, states in loop.snapshot().pages.items():
        for state, count in states.items():
            if state not in ("free", "cached") and count:
                held[f"{group}/{state}"] += count
    return held


def copy_page(source: EngineLoop, target: EngineLoop, group: str, page: int, to: int) -> None:
    """One page of one group, all layers, from one engine's memory to another's."""
    target.kv_cache.memory(group)[to].copy_(source.kv_cache.memory(group)[page])


class SplitPair:
    """A prefill engine and a decode engine, joined by copying pages as a transport would."""

    def __init__(
        self,
        prefill: EngineSettings,
        decode: EngineSettings,
        prefill_model: LanguageModel | None = None,
        decode_model: LanguageModel | None = None,
        mode: str = "plain",
    ) -> None:
        self.prefill = make_engine(mode, prefill_model or FakeModel(), prefill, on_kv_written=self.ship)
        self.decode = make_engine(mode, decode_model or FakeModel(), decode)
        self.requests: dict[str, EngineRequest] = {}
        self.emitted: dict[str, list[int]] = {}
        self.wanted: dict[tuple[str, int], PagesReserved] = {}
        self.shipped: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self.transcript = Transcript()

    def submit(self, request: EngineRequest) -> None:
        """Hand a REMOTE_KV request to the decode engine."""
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = list(request.output_token_ids)
        self.decode.submit(request)

    def ship(self, event: KvWritten) -> None:
        """Copy the layers of one layer group of the pages that the decode side wants."""
        wanted = self.wanted.get((event.request_id, event.attempt))
        if wanted is None:
            return
        offset = wanted.cached_tokens // PAGE
        groups = self.prefill.settings.layer_groups
        for group, pairs, first, pages in (
            ("full", event.full_pages, offset, wanted.full_pages),
            ("sliding", event.sliding_pages, wanted.sliding_first_page, wanted.sliding_pages),
        ):
            source, target = self.prefill.kv_cache.memory(group), self.decode.kv_cache.memory(group)
            layers = source.shape[1]
            some = slice(event.layer_group * layers // groups, (event.layer_group + 1) * layers // groups)
            for logical, physical in pairs:
                if logical >= first:
                    target[pages[logical - first], some] = source[physical, some]
        self.shipped.setdefault((event.request_id, event.attempt), set()).add(
            (event.chunk, event.layer_group)
        )

    def turn(self) -> None:
        """One step of each engine, and what their owners do with the events."""
        for event in self.decode.step():
            self.transcript.take([event])
            if isinstance(event, TokensSampled):
                self.emitted[event.request_id] += event.token_ids
            if isinstance(event, PagesReserved) and event.kv_tokens > event.cached_tokens:
                self.reserved(event)
        for event in self.prefill.step():
            if isinstance(event, PrefillComputed):
                self.prefill.release(event.request_id, event.attempt)
                self.decode.kv_ready(event.request_id, event.attempt)

    def reserved(self, event: PagesReserved) -> None:
        """Ask the prefill engine for what is missing."""
        request = self.requests[event.request_id]
        tokens = (*request.prompt_token_ids, *self.emitted[event.request_id])
        assert event.kv_tokens == len(tokens) - 1
        self.wanted[event.request_id, event.attempt] = event
        self.prefill.submit(
            make_request(event.request_id, tokens, kind=RequestKind.PREFILL_ONLY, attempt=event.attempt)
        )

    def run(self, limit: int = 2000) -> Transcript:
        """Turn until both engines rest."""
        for _ in range(limit):
            if not (self.decode.has_work() or self.prefill.has_work()):
                return self.transcript
            self.turn()
        raise AssertionError(f"still busy: {self.decode.snapshot()}")


@dataclass(frozen=True)
class EngineKit:
    """Everything above, handed to tests as one fixture because test folders are not packages."""

    FakeModel = FakeModel
    LazyRuntime = LazyRuntime
    MODES = MODES
    SplitPair = SplitPair
    Transcript = Transcript
    VOCABULARY = VOCABULARY
    WINDOW = WINDOW
    PAGE = PAGE
    fake_config = staticmethod(fake_config)
    settings = staticmethod(settings)
    request = staticmethod(make_request)
    prompt_of = staticmethod(prompt_of)
    run = staticmethod(run)
    held_pages = staticmethod(held_pages)
    copy_page = staticmethod(copy_page)

    engine = staticmethod(make_engine)

    @staticmethod
    def loop(mode: str = "plain", **changes: object) -> EngineLoop:
        """An engine on the fake model."""
        return make_engine(mode, FakeModel(), settings(**changes))


@pytest.fixture(scope="session")
def kit() -> EngineKit:
    """The fake model, small engines and their drivers."""
    return EngineKit()
