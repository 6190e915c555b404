"""What a lone prompt costs the host, without a model: for how long its device stands still.

The device takes as long as it is told for each captured graph, and nothing for its launch. Told apart is when
it stands still: before it begins, between two steps, and after the last one until the event is there that is
waited for. Times are processor time of the one thread, so that other work on the machine does not count; what
CUDA's own interface and the waking of threads cost is not in them.

Run: ``python -m antiphon.benchmarks.engine_prompt_cost --tokens 1024,8192,32768``.
"""

from __future__ import annotations

import argparse
import cProfile
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.benchmarks.engine_host_cost import InstantModel
from antiphon.configs.workers import standard_graphed_chunks
from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import HostRuntime
from antiphon.engine.events import EngineEvent, PagesReserved, PrefillComputed, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.config import preset
from antiphon.protocol.messages import SamplingParams

PAGE = 64
PROMPT_VOCABULARY = 200_000
EventKind = TypeVar("EventKind", bound=EngineEvent)


class ChoosingModel(InstantModel):
    """Chooses token 7 without logits, which at the width of a real vocabulary would be work of its own."""

    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """[M, 2]; see ``ChoosesTokens``."""
        return torch.tensor([[7.0, 0.0]], dtype=torch.float64).expand(len(hidden), -1)


class PacedRuntime(HostRuntime):
    """A device on which captured work takes as long as it is told, and issuing it nothing.

    Its clock is the thread's processor time, and jumps over what is waited for.
    """

    def __init__(self, chunk_s: float, step_s: float) -> None:
        super().__init__()
        self._chunk_s, self._step_s = chunk_s, step_s
        self._skipped_s = 0.0
        self.begun_s: float | None = None
        """When the first work since ``forget`` began."""
        self.waited_s = 0.0
        """When the last work that was waited for ended, and how long all of it took."""
        self.busy_s = 0.0
        self.free_s = 0.0
        """When it was, or will be, done with what was issued."""
        self._issued_s = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self._skipped_s

    def forget(self) -> None:
        """The next work is the first; nothing may be on its way."""
        self.begun_s, self.busy_s, self._issued_s = None, 0.0, 0.0

    def submit(self, issue: Callable[[], None]) -> PacedWork:
        """See ``DeviceRuntime``."""
        super().submit(issue)
        return PacedWork(self, self.free_s, self._issued_s)

    def capture(self, compute: Callable[[], Tensor]) -> PacedGraph:
        """Of a decode step, which is two: its forward pass and its choice of tokens."""
        return PacedGraph(self, super().capture(compute).output, self._step_s / 2, 1)

    def capture_parts(self, compute: Callable[[Callable[[], None]], Tensor]) -> PacedGraph:
        """Of a chunk."""
        cuts: list[None] = []
        with torch.inference_mode():
            output = compute(lambda: cuts.append(None)).clone()
        return PacedGraph(self, output, self._chunk_s, len(cuts) + 1)

    def compute(self, seconds: float) -> None:
        """Begin, as soon as what was issued before is done."""
        begin = max(self.now(), self.free_s)
        if self.begun_s is None:
            self.begun_s = begin
        self.free_s = begin + seconds
        self._issued_s += seconds

    def pass_until(self, moment_s: float, busy_s: float) -> None:
        """Skip the time in which the host would wait."""
        self._skipped_s += max(0.0, moment_s - self.now())
        self.waited_s, self.busy_s = moment_s, busy_s


@dataclass(frozen=True, slots=True)
class PacedWork:
    """See ``Completion``."""

    runtime: PacedRuntime
    done_s: float
    busy_s: float

    def wait(self) -> None:
        """Until the clock says that it is done."""
        self.runtime.pass_until(self.done_s, self.busy_s)


@dataclass(slots=True)
class PacedGraph:
    """See ``Captured`` and ``CapturedParts``."""

    runtime: PacedRuntime
    output: Tensor
    seconds: float
    parts: int

    def replay(self, after_part: Callable[[int], None] = lambda part: None) -> None:
        """Take so long."""
        for part in range(self.parts):
            self.runtime.compute(self.seconds / self.parts)
            after_part(part)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Microseconds for which the device stands still, or has not begun, until the event that is waited for.

    Attributes:
        before_us: until the first work begins. between_us: between two steps. after_us: from the end of the
            last that was waited for.
    """

    before_us: float
    between_us: float
    after_us: float

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.before_us + self.between_us + self.after_us


class LonePrompts:
    """An engine with captured chunks and steps, in which prompts follow one another.

    Args:
        tokens: of each prompt; its chunks have up to ``CHUNK_TOKENS``.
        layer_groups: as a prefill worker's.
    """

    CHUNK_TOKENS = 8192
    MS_PER_TOKEN, STEP_MS = 0.01, 1.5

    def __init__(self, tokens: int, layer_groups: int = 1) -> None:

        self._tokens = tokens
        self._number = 0
        chunk = min(self.CHUNK_TOKENS, -(-tokens // PAGE) * PAGE)
        settings = EngineSettings(
            page_size_tokens=PAGE,
            full_pages=3 * (tokens // PAGE + 4),
            sliding_pages=3 * (chunk // PAGE + 8),
            window_tokens=128,
            max_context_tokens=131_072,
            vocab_size=PROMPT_VOCABULARY,
            chunk_tokens=chunk,
            max_batch_size=2,
            layer_groups=layer_groups,
            overlap=True,
            decode_graphs=True,
            chunk_graph_tokens=standard_graphed_chunks(chunk),
        )
        self.runtime = PacedRuntime(chunk * self.MS_PER_TOKEN / 1e3, self.STEP_MS / 1e3)
        self.loop = EngineLoop(
            ChoosingModel(preset("tiny")),
            settings,
            executor=lambda model, cache, resolved: DeviceExecutor(model, cache, resolved, self.runtime),
            on_scheduled=lambda event: None,
            on_kv_written=lambda event: None,
        )

    def colocated(self) -> PromptCost:
        """The engine that computes and decodes: prompt in, first token out."""
        name, prompt = self._next()
        begin = self._begin()
        self._submit(name, RequestKind.COLOCATED, prompt)
        self._until(TokensSampled)
        cost = self._cost(begin)
        self._end(name)
        return cost

    def prefill(self) -> PromptCost:
        """A prefill worker's engine: prompt in, all of it computed."""
        name, prompt = self._next()
        begin = self._begin()
        self._submit(name, RequestKind.PREFILL_ONLY, prompt)
        self._until(PrefillComputed)
        cost = self._cost(begin)
        self._end(name)
        return cost

    def decode(self) -> PromptCost:
        """A decode worker's engine: the last of the KV in, first token out."""
        name, prompt = self._next()
        self._submit(name, RequestKind.REMOTE_KV, prompt)
        reserved = self._until(PagesReserved)
        begin = self._begin()
        self.loop.kv_ready(name, reserved.attempt)
        self._until(TokensSampled)
        cost = self._cost(begin)
        self._end(name)
        return cost

    def both_halves(self) -> PromptCost:
        """The two one behind the other in one engine, over the same pages: prompt in, first token out."""
        name, prompt = self._next()
        begin = self._begin()
        self._submit(name, RequestKind.PREFILL_ONLY, prompt)
        self._until(PrefillComputed)
        self._submit(f"{name}d", RequestKind.REMOTE_KV, prompt)
        reserved = self._until(PagesReserved)
        if reserved.kv_tokens > reserved.cached_tokens:
            self.loop.kv_ready(f"{name}d", reserved.attempt)
        self._until(TokensSampled)
        cost = self._cost(begin)
        self._end(name, f"{name}d")
        return cost

    def _next(self) -> tuple[str, tuple[int, ...]]:
        self._number += 1
        ids = random.Random(self._number).choices(range(PROMPT_VOCABULARY), k=self._tokens)
        return f"r{self._number}", tuple(ids)

    def _submit(self, name: str, kind: RequestKind, prompt: tuple[int, ...]) -> None:
        sampling = None
        if kind is not RequestKind.PREFILL_ONLY:
            sampling = SamplingParams(
                max_tokens=64, seed=self._number, temperature=1.0, stop_token_ids=(1, 2, 3)
            )
        self.loop.submit(EngineRequest(name, 1, kind, prompt, sampling=sampling, deadline_s=600.0))

    def _begin(self) -> float:
        self.runtime.forget()
        return self.runtime.now()

    def _cost(self, begin_s: float) -> PromptCost:
        runtime, end_s = self.runtime, self.runtime.now()
        if runtime.begun_s is None:
            raise RuntimeError("nothing was computed")
        before_s = runtime.begun_s - begin_s
        between_s = runtime.waited_s - runtime.begun_s - runtime.busy_s
        return PromptCost(before_s * 1e6, between_s * 1e6, (end_s - runtime.waited_s) * 1e6)

    def _until(self, kind: type[EventKind]) -> EventKind:
        while True:
            for event in self.loop.step():
                if isinstance(event, kind):
                    return event

    def _end(self, *names: str) -> None:
        for name in names:
            self.loop.abort(name, 1)
        while self.loop.has_work():
            self.loop.step()


def lone_prompts(tokens: int, repeats: int, profile: Path | None = None) -> None:
    """Print a line per part that an engine may have of a prompt."""
    prompts = LonePrompts(tokens), LonePrompts(tokens, layer_groups=2)
    cases = {
        "colocated": prompts[0].colocated,
        "prefill worker": prompts[1].prefill,
        "decode worker": prompts[0].decode,
        "both halves": prompts[0].both_halves,
    }
    for name, case in cases.items():
        for _ in range(3):
            case()
        costs = [case() for _ in range(repeats)]
        parts = [
            statistics.median(getattr(cost, part) for cost in costs)
            for part in ("total_us", "before_us", "between_us", "after_us")
        ]
        total, before, between, after = parts
        split = f"before {before:6.0f}   between {between:6.0f}   after {after:6.0f}"
        print(f"{tokens:6d} {name:15s} {total:6.0f} us   {split}", flush=True)
        if profile is not None:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(repeats):
                case()
            profiler.disable()
            profiler.dump_stats(profile / f"{name.replace(' ', '-')}-{tokens}.prof")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per prompt length and part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--profile", type=Path, help="a folder for profiles, one of each line")
    options = parser.parse_args(arguments)
    for tokens in options.tokens.split(","):
        lone_prompts(int(tokens), options.repeats, options.profile)


if __name__ == "__main__":
    main()
