"""From targets to layouts, numbers of workers and prices.

Prefill and decode are sized apart, since neither waits for the other's GPUs: prefill as a queue of prompts at
batch 1, decode as places in batches that are as large as the ITL target and the memory allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from antiphon.benchmarks import floors
from antiphon.benchmarks.plan import work
from antiphon.benchmarks.plan.cost_model import CHUNK_TOKENS, RESERVED_BYTES, CostModel
from antiphon.benchmarks.plan.queueing import fewest_servers, staffed, wait_quantile_s
from antiphon.benchmarks.records import Layout
from antiphon.protocol.errors import AntiphonError

BATCH_LIMIT = 1024
HIGHEST_RATE = 1e6
"""Requests per second; the search for numbers of workers takes longer the more there are."""
HANDOVER_S = 0.002
"""Assumed: reservation, announcement and completion of a transfer."""
LAYER_GROUPS = 2
SLICES = 32
"""Equally likely lengths that stand for a distribution."""
LAYOUTS = tuple(Layout(tp, ep) for tp in (1, 2, 4, 8) for ep in dict.fromkeys((1, tp)))


class NoPlan(AntiphonError):
    """No layout meets the targets; the message says which target and how near the best comes."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What is wanted, and of what load."""

    ttft_s: float
    itl_s: float
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    quantile: float = 0.95
    """Of requests that shall meet the TTFT."""
    link_bytes_per_s: float = 50e9
    """Between a prefill and a decode GPU; 50 GB/s is one 400 Gb/s port per GPU."""
    gpu_hour_price: float = 3.0
    length_sigma: float = 0.7
    """Spread of prompt and answer lengths: standard deviation of their logarithm around the given means."""
    busiest: float = 0.85
    """Utilisation of the prefill pool that is never exceeded, however large it is."""

    def __post_init__(self) -> None:
        values = {
            "ttft": self.ttft_s,
            "itl": self.itl_s,
            "rps": self.requests_per_s,
            "link": self.link_bytes_per_s / 1e9,
            "price": self.gpu_hour_price,
        }
        for name, value in values.items():
            if not (value > 0 and math.isfinite(value)):
                raise NoPlan(f"{name} {value:g}: must be a positive number")
        if self.requests_per_s > HIGHEST_RATE:
            raise NoPlan(
                f"rps {self.requests_per_s:g}: at most {HIGHEST_RATE:g} requests per second are planned"
            )
        if self.input_tokens < 1 or self.output_tokens < 1 or not 0.5 <= self.quantile < 1:
            raise NoPlan("lengths are at least 1 token, the quantile lies in [0.5, 1)")
        if not 0 <= self.length_sigma <= 2 or not 0 < self.busiest < 1:
            raise NoPlan("the spread of lengths lies in [0, 2], the highest utilisation in (0, 1)")


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Workers that fill KV, one prompt at a time each."""

    layout: Layout
    workers: int
    prompt_s: float
    wait_s: float
    """Quantile of the wait for a free worker."""
    handover_s: float
    """End of the prompt's computation to the last page in place."""
    utilisation: float

    @property
    def gpus(self) -> int:
        """GPUs of the pool."""
        return self.workers * self.layout.gpus


@dataclass(frozen=True, slots=True)
class DecodePool:
    """Workers that decode in continuous batches."""

    layout: Layout
    workers: int
    batch: int
    """Largest batch that keeps the ITL and fits the memory."""
    memory_batch: int
    """Largest batch that fits the memory alone."""
    step_s: float
    """A step of the largest batch."""
    mean_batch: float
    """Sequences that run on one worker on average at this load."""

    @property
    def gpus(self) -> int:
        """GPUs of the pool."""
        return self.workers * self.layout.gpus


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to meet the targets."""

    model: str
    targets: Targets
    prefill: PrefillPool
    decode: DecodePool

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.prefill.gpus + self.decode.gpus

    @property
    def ttft_s(self) -> float:
        """Quantile of the wait, then the prompt, the hand-over and up to two decode steps."""
        pool = self.prefill
        return pool.wait_s + pool.prompt_s + pool.handover_s + 2 * self.decode.step_s

    @property
    def input_price(self) -> float:
        """US dollars per million input tokens: the prefill pool's cost."""
        rate = self.targets.requests_per_s * self.targets.input_tokens
        return price_per_million(self.prefill.gpus, self.targets.gpu_hour_price, rate)

    @property
    def output_price(self) -> float:
        """US dollars per million output tokens: the decode pool's cost."""
        rate = self.targets.requests_per_s * self.targets.output_tokens
        return price_per_million(self.decode.gpus, self.targets.gpu_hour_price, rate)


def price_per_million(gpus: float, gpu_hour_price: float, tokens_per_s: float) -> float:
    """US dollars per million tokens at a rate."""
    return gpus * gpu_hour_price / 3600 / tokens_per_s * 1e6


def largest_batch_within(model: CostModel, layout: Layout, context: float, itl_s: float, limit: int) -> int:
    """Largest batch, at most ``limit``, whose step takes at most ``itl_s``; 0 when one sequence is too slow.

    A step's time never falls with the batch as long as its kernels are the same, so the search halves on
    either side of where they change, where it may fall.
    """
    change = min(limit, work.last_streamed(model.shape, layout))
    for below, high in ((change, limit), (0, change)):
        low = below
        while low < high:
            middle = (low + high + 1) // 2
            if model.decode_step_s(layout, middle, context) <= itl_s:
                low = middle
            else:
                high = middle - 1
        if low > below:
            return low
    return 0


def size_decode(model: CostModel, layout: Layout, targets: Targets) -> DecodePool | None:
    """Workers of one layout for the targets; None when it does not fit or one sequence is too slow."""
    final = targets.input_tokens + targets.output_tokens
    mean_context = targets.input_tokens + targets.output_tokens / 2
    memory_batch = model.largest_batch(layout, final)
    batch = largest_batch_within(model, layout, mean_context, targets.itl_s, min(memory_batch, BATCH_LIMIT))
    if batch == 0:
        return None
    step_s = model.decode_step_s(layout, batch, mean_context)
    # A place is held from the reservation on, so through prefill too; the TTFT bounds that.
    residents = targets.requests_per_s * (targets.output_tokens * step_s + targets.ttft_s)
    workers = staffed(residents, batch, NormalDist().inv_cdf(targets.quantile))
    mean_batch = _mean_batch(model, layout, targets, workers, mean_context, batch)
    return DecodePool(layout, workers, batch, memory_batch, step_s, mean_batch)


def size_prefill(
    model: CostModel, layout: Layout, targets: Targets, first_steps_s: float
) -> PrefillPool | None:
    """Workers of one layout such that wait, prompt, hand-over and ``first_steps_s`` fit into the TTFT."""
    weights = model.weight_bytes(layout).total
    prompt_kv = floors.kv_bytes(model.shape, targets.input_tokens) / layout.tp
    if weights + prompt_kv > model.gpu.memory_bytes - RESERVED_BYTES:
        return None
    prompt_s = model.prefill_s(layout, targets.input_tokens)
    handover_s = handover(model, targets, layout, prompt_s, targets.input_tokens)
    spare_s = targets.ttft_s - prompt_s - handover_s - first_steps_s
    if spare_s < 0:
        return None
    rate = targets.requests_per_s
    mean_s, cv2 = prompt_moments(model, layout, targets)
    workers = max(
        fewest_servers(rate, mean_s, cv2, spare_s, targets.quantile),
        math.ceil(rate * mean_s / targets.busiest),
    )
    wait_s = wait_quantile_s(workers, rate, mean_s, cv2, targets.quantile)
    return PrefillPool(layout, workers, prompt_s, wait_s, handover_s, rate * mean_s / workers)


def prompt_moments(model: CostModel, layout: Layout, targets: Targets) -> tuple[float, float]:
    """(mean seconds, squared coefficient of variation) of prompts of log-normal length."""
    normal, sigma = NormalDist(), targets.length_sigma
    scores = [normal.inv_cdf((index + 0.5) / SLICES) for index in range(SLICES)]
    factors = [math.exp(sigma * score) for score in scores]
    unit = targets.input_tokens * SLICES / sum(factors)  # the slices keep the mean that was asked for
    longest = model.shape.max_context_tokens
    times = [model.prefill_s(layout, min(longest, max(1, round(unit * each)))) for each in factors]
    mean_s = sum(times) / SLICES
    return mean_s, sum((time - mean_s) ** 2 for time in times) / SLICES / mean_s**2


def handover(model: CostModel, targets: Targets, layout: Layout, prompt_s: float, tokens: int) -> float:
    """End of computation to the last page: what the link could not hide, at least the last layer group."""
    link = targets.link_bytes_per_s * layout.tp
    whole_s = floors.kv_bytes(model.shape, tokens) / link
    last_chunk = (tokens - 1) % CHUNK_TOKENS + 1
    last_s = floors.kv_bytes(model.shape, last_chunk) / LAYER_GROUPS / link
    return HANDOVER_S + max(last_s, whole_s - prompt_s * (1 - 1 / LAYER_GROUPS))


def plans(model: CostModel, targets: Targets, layouts: Sequence[Layout] = LAYOUTS) -> list[Plan]:
    """One plan per decode layout with the cheapest prefill pool for it, fewest GPUs first.

    Raises:
        NoPlan: no layout keeps the ITL, or none keeps the TTFT.
    """
    decodes = [pool for layout in layouts if (pool := size_decode(model, layout, targets))]
    if not decodes:
        raise NoPlan(_why_not_itl(model, targets, layouts))
    found = []
    for decode in decodes:
        pools = [size_prefill(model, layout, targets, 2 * decode.step_s) for layout in layouts]
        fitting = [pool for pool in pools if pool is not None]
        if fitting:
            prefill = min(fitting, key=lambda pool: (pool.gpus, pool.prompt_s))
            found.append(Plan(model.model, targets, prefill, decode))
    if not found:
        raise NoPlan(_why_not_ttft(model, targets, layouts))
    return sorted(found, key=lambda plan: (plan.gpus, plan.ttft_s, plan.decode.step_s))


def _mean_batch(
    model: CostModel, layout: Layout, targets: Targets, workers: int, context: float, batch: int
) -> float:
    """The batch at which one worker gives out tokens as fast as requests ask for them."""
    asked = targets.requests_per_s * targets.output_tokens / workers
    low, high = 0.0, float(batch)
    for _ in range(40):
        middle = (low + high) / 2
        # b / step(b) grows with b, because a step has a fixed part.
        if middle / model.decode_step_s(layout, middle, context) < asked:
            low = middle
        else:
            high = middle
    return high


def _why_not_itl(model: CostModel, targets: Targets, layouts: Sequence[Layout]) -> str:
    context = targets.input_tokens + targets.output_tokens / 2
    fitting = [each for each in layouts if model.largest_batch(each, context) > 0]
    if not fitting:
        return f"{model.model} with {context:.0f} tokens of context fits no layout"
    best = min(model.decode_step_s(each, 1, context) for each in fitting)
    return (
        f"itl {targets.itl_s * 1e3:g} ms: the quickest layout takes {best * 1e3:.2f} ms for one sequence "
        f"of {context:.0f} tokens (predicted)"
    )


def _why_not_ttft(model: CostModel, targets: Targets, layouts: Sequence[Layout]) -> str:
    best = min(model.prefill_s(each, targets.input_tokens) for each in layouts)
    return (
        f"ttft {targets.ttft_s * 1e3:g} ms: the quickest layout takes {best * 1e3:.1f} ms for a prompt of "
        f"{targets.input_tokens} tokens, before hand-over and first step (predicted)"
    )
