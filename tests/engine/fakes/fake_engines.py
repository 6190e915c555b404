"""Small engines on the fake model, requests for them, and what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fake_model import PAGE, VOCABULARY, WINDOW

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Completion, HostRuntime
from antiphon.engine.events import (
    EngineEvent,
    SequenceFinished,
    TokensSampled,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.forward import LanguageModel
from antiphon.protocol.messages import SamplingParams


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
