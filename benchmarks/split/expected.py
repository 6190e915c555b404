"""What the cost model expects of an arrangement: where its ladder of loads may begin, and what a load finds.

Nothing that is reported rests on these figures. A ladder that begins near the capacity needs fewer loads, and
a load that begins with as many requests in service as it would have in the long run needs a shorter warm-up.
"""

from __future__ import annotations

import math

from antiphon.benchmarks.plan.cost_model import CostModel
from antiphon.benchmarks.plan.planner import largest_batch_within
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.mixes import Mix
from antiphon.configs.workers import WorkerConfig

BUSIEST = 0.85
"""Utilisation of prefill beyond which prompts wait too long."""
KEPT = 0.9
"""Share of requests that keep their limits, as the comparison asks by default."""
CHUNK_TOKENS = 8192
PLACES = 128
"""Assumed of one GPU of a server whose configuration is not known."""


def capacity_per_s(model: CostModel, arrangement: Arrangement, mix: Mix, itl_s: float) -> float:
    """Requests per second of a mix up to which tokens come within ``itl_s``; 0 when not even one does."""
    config = arrangement.config
    if config is None:  # somebody else's server: as one engine a GPU
        chunk = arrangement.chunk_tokens or CHUNK_TOKENS
        return arrangement.gpus * _engine_per_s(model, Layout(), PLACES, chunk, mix, itl_s)
    decode, layout = config.decode, _layout(config.decode)
    if not config.prefill.replicas:
        one = _engine_per_s(model, layout, decode.max_batch_size, decode.chunk_tokens, mix, itl_s)
        return decode.replicas * one
    prompt_s = _prompt_s(model, _layout(config.prefill), mix, config.prefill.chunk_tokens)
    batch = _batch(model, layout, decode.max_batch_size, mix, itl_s)
    if not batch:
        return 0.0
    answered = batch / (mix.output_tokens * model.decode_step_s(layout, batch, _context(mix)))
    return min(config.prefill.replicas * BUSIEST / prompt_s, decode.replicas * answered)


def in_service(model: CostModel, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> int:
    """Requests that decode at a time, in the long run, at a load; no more than there are places."""
    config = arrangement.config
    if config is None:
        engines, layout, places = arrangement.gpus, Layout(), PLACES
        chunk = arrangement.chunk_tokens or CHUNK_TOKENS
        busy = rate_per_s / engines * _prompt_s(model, layout, mix, chunk)
    else:
        engines, layout, places = config.decode.replicas, _layout(config.decode), config.decode.max_batch_size
        chunk = config.decode.chunk_tokens
        # An engine that does both makes its decodes wait for prompts.
        prompt_s = 0.0 if config.prefill.replicas else _prompt_s(model, layout, mix, chunk)
        busy = rate_per_s / engines * prompt_s
    stretch = 1 / max(0.1, 1 - busy)
    found = 1.0
    for _ in range(30):
        step_s = model.decode_step_s(layout, found, _context(mix)) * stretch
        found = min(float(places), max(1.0, rate_per_s / engines * mix.output_tokens * step_s))
    return round(engines * found)


def _engine_per_s(
    model: CostModel, layout: Layout, places: int, chunk_tokens: int, mix: Mix, itl_s: float
) -> float:
    """Of an engine whose time goes to prompts and to decode steps.

    A step with a chunk that takes longer than the limit is one bad gap for every sequence that decodes. A
    request keeps its own 99th percentile as long as few enough such steps fall into its time.
    """
    batch = _batch(model, layout, places, mix, itl_s)
    if not batch:
        return 0.0
    step_s = model.decode_step_s(layout, batch, _context(mix))
    busy = 1 / (_prompt_s(model, layout, mix, chunk_tokens) + mix.output_tokens * step_s / batch)
    chunk = min(chunk_tokens, mix.input_tokens)
    alone_s = model.decode_step_s(layout, 1, _context(mix))
    if model.prefill_s(layout, chunk) + alone_s <= itl_s:
        return busy
    bad_gaps = poisson_mean(int(0.01 * (mix.output_tokens - 1)), KEPT)
    chunks = -(-mix.input_tokens // chunk_tokens)
    return min(busy, bad_gaps / (chunks * mix.output_tokens * alone_s))


def poisson_mean(most: int, share: float) -> float:
    """Mean of a Poisson number that is at most ``most`` in ``share`` of all cases."""
    low, high = 0.0, 10.0 * (most + 5)
    for _ in range(60):
        mean = (low + high) / 2
        terms = [math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(most + 1)]
        low, high = (mean, high) if math.fsum(terms) > share else (low, mean)
    return low


def _prompt_s(model: CostModel, layout: Layout, mix: Mix, chunk_tokens: int) -> float:
    done, total = 0, 0.0
    while done < mix.input_tokens:
        chunk = min(chunk_tokens, mix.input_tokens - done)
        total += model.prefill_s(layout, chunk, done)
        done += chunk
    return total


def _batch(model: CostModel, layout: Layout, places: int, mix: Mix, itl_s: float) -> int:
    places = min(places, model.largest_batch(layout, mix.input_tokens + mix.output_tokens))
    return largest_batch_within(model, layout, _context(mix), itl_s, places)


def _context(mix: Mix) -> float:
    return mix.input_tokens + mix.output_tokens / 2


def _layout(worker: WorkerConfig) -> Layout:
    return Layout(worker.tensor_parallel, worker.tensor_parallel if worker.expert_parallel else 1)
