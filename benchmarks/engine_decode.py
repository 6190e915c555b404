"""Decode steps through the real engine loop and the serving sampler, on synthesized weights.

Every sequence has random keys and values of its own in pages of its own, as if a peer had written them, and
random tokens from then on; the time of a step is the time between two commits.
"""

from __future__ import annotations

import statistics
import time

from antiphon.benchmarks.engine_model import PAGE, Bench, BenchmarkError, free_memory
from antiphon.benchmarks.expert_spread import expert_spread, recorded_routing
from antiphon.benchmarks.floors import decode_floor_ms
from antiphon.benchmarks.records import BENCH_DECODE, Record
from antiphon.engine.events import PagesReserved, SequenceFinished, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.protocol.messages import SamplingParams

WARMUP_STEPS = 16
SPREAD_STEPS = 4
SPREAD_TOLERANCE = 0.05


def sampling(max_tokens: int, seed: int) -> SamplingParams:
    """What the model's authors recommend: temperature 1, nothing cut."""
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


class DecodingEngine:
    """An engine in which so many sequences as a point has decode, all of them in every step.

    Args:
        largest_batch: sequences that there is room for; graphs are captured for all batches up to that.
        context: tokens of each sequence.
        steps: that each sequence may take.
    """

    def __init__(self, bench: Bench, largest_batch: int, context: int, steps: int, *, graphs: bool) -> None:
        self._bench, self._context, self._steps = bench, context, steps
        settings = bench.settings(sequences=largest_batch, tokens=context + steps + PAGE, graphs=graphs)
        self.loop = bench.engine(settings)
        self._prompts: list[tuple[int, ...]] = []
        self._points = 0

    def start(self, batch: int) -> None:
        """Let ``batch`` sequences decode, in place of those before.

        Raises:
            BenchmarkError: they do not.
        """
        self.stop()
        self._points += 1
        while len(self._prompts) < batch:
            self._prompts.append(self._bench.prompt(self._context + 1, len(self._prompts)))
        for number, prompt in enumerate(self._prompts[:batch]):
            params = sampling(self._steps + PAGE, number)
            name = self._name(number)
            self.loop.submit(EngineRequest(name, 1, RequestKind.REMOTE_KV, prompt, sampling=params))
        before = self.loop.snapshot().generated_tokens
        for _ in range(2 * batch + 2):
            for event in self.loop.step():
                if isinstance(event, PagesReserved) and event.kv_tokens > event.cached_tokens:
                    self.loop.kv_ready(event.request_id, event.attempt)
            now = self.loop.snapshot()
            if now.running == batch and now.generated_tokens > before:
                return
        raise BenchmarkError(f"{self.loop.snapshot().running} of {batch} sequences run")

    def stop(self) -> None:
        """End the sequences that decode; their pages are free afterwards."""
        for number in range(self.loop.snapshot().running):
            self.loop.abort(self._name(number), 1)
        while self.loop.has_work():
            self.loop.step()

    def _name(self, number: int) -> str:
        return f"p{self._points}s{number}"


def timed_steps(loop: EngineLoop, batch: int, steps: int) -> list[float]:
    """Seconds of each step; every one must have brought one good token for every sequence."""
    times, seen = [], set()
    before = time.perf_counter()
    for _ in range(steps):
        events = loop.step()
        after = time.perf_counter()
        times.append(after - before)
        before = after
        ended = [event for event in events if isinstance(event, SequenceFinished)]
        if ended:
            raise BenchmarkError(f"{ended[0].request_id} ended: {ended[0].reason} {ended[0].error}")
        tokens = [token for event in events if isinstance(event, TokensSampled) for token in event.token_ids]
        if len(tokens) != batch:
            raise BenchmarkError(f"a step brought {len(tokens)} tokens for {batch} sequences")
        seen.update(tokens)
    if len(seen) < min(steps * batch, 100) // 2:
        raise BenchmarkError(f"{steps * batch} tokens, only {len(seen)} different ones")
    return times


def decode_spread(bench: Bench, batch: int, context: int) -> float:
    """``expert_spread`` of a few steps of the same kind, computed eagerly."""
    engine = DecodingEngine(bench, batch, context, SPREAD_STEPS, graphs=False)
    engine.start(batch)
    with recorded_routing() as seen:
        timed_steps(engine.loop, batch, SPREAD_STEPS)
    return expert_spread(bench.model.config, seen)


class DecodeSteps:
    """Steps of several batches at one context, in one engine whose graphs were captured once.

    Args:
        graphs: steps are replayed from them, and not issued launch by launch.
    """

    def __init__(
        self, bench: Bench, largest_batch: int, context: int, steps: int, *, graphs: bool = True
    ) -> None:
        self._bench, self._context, self._steps = bench, context, steps
        self._engine = DecodingEngine(bench, largest_batch, context, WARMUP_STEPS + steps, graphs=graphs)

    def point(self, batch: int, spread: float) -> Record:
        """Median step of a batch; ``spread`` is what is known of how it spreads over the experts."""
        self._engine.start(batch)
        loop = self._engine.loop
        timed_steps(loop, batch, WARMUP_STEPS)
        times = [seconds * 1e3 for seconds in timed_steps(loop, batch, self._steps)]
        self._engine.stop()
        extra = {
            "resident_weights": "mxfp4",
            "steps": self._steps,
            "p10": _quantile(times, 0.1),
            "p90": _quantile(times, 0.9),
            "expert_spread": round(spread, 4),
            "ok": abs(spread - 1) <= SPREAD_TOLERANCE,
            "road": loop.executor.road,
        }
        floor = decode_floor_ms(self._bench.model.config, batch, self._context)
        value = statistics.median(times)
        return self._bench.record(BENCH_DECODE, value, floor, extra, batch=batch, context=self._context)


def decode_point(bench: Bench, batch: int, context: int, steps: int) -> Record:
    """Median step at one batch size and context, in an engine of its own."""
    spread = decode_spread(bench, batch, context)
    free_memory()
    return DecodeSteps(bench, batch, context, steps).point(batch, spread)


def _quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[int(share * (len(values) - 1))], 4)
