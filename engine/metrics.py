"""What an engine exports: its counts as they are when somebody asks, and histograms of its steps.

Nothing is counted twice: counts come from the snapshot that the engine keeps anyway, so an update costs
nothing. Only the histograms are fed, on the engine's thread, once per step that had events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from antiphon.engine.events import EngineEvent, TokensSampled
from antiphon.engine.settings import EngineSettings
from antiphon.engine.snapshot import EngineSnapshot
from antiphon.protocol.messages import FinishReason
from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopHistogram
from antiphon.telemetry.registry import PREFIX, ProcessRegistry

VLLM_NAMES = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc",),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "prompt_tokens_by_source": ("prompt_tokens_by_source",),
    "preemptions": ("num_preemptions",),
    "iteration_tokens": ("iteration_tokens_total",),
}
"""What of vLLM's metrics an engine has a counterpart of."""

_GAUGES = {
    "num_requests_running": "Sequences that compute: prefilling or decoding.",
    "num_requests_waiting": "Sequences that hold no pages yet.",
    "num_requests_awaiting_kv": "Reservations that wait for a peer's KV.",
    "num_requests_pinned": "Computed prompts whose pages wait until they are shipped.",
    "num_requests_quarantined": "Ended attempts whose pages a peer may still touch.",
    "queued_prefill_tokens": "Prompt tokens that this engine has yet to compute.",
    "kv_cache_usage_perc": "Share of the pages of full-attention layers that requests hold, 0 to 1.",
}
_COUNTERS = {
    "engine_steps": "Steps that computed something.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens sampled.",
    "preemptions": "Sequences that gave their pages back for want of pages.",
    "stale_commands": "Commands for requests or attempts that were no longer there.",
}


class EngineMetrics:
    """Exports one engine to a registry."""

    def __init__(
        self,
        registry: ProcessRegistry,
        settings: EngineSettings,
        snapshot: Callable[[], EngineSnapshot],
        *,
        vllm_names: bool = False,
    ) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._vllm_names = vllm_names
        self._computed_before = 0
        self._batch_size = LoopHistogram(
            f"{PREFIX}batch_size", "Sequences that a step sampled for.", buckets.SEQUENCES, registry
        )
        self._iteration_tokens = LoopHistogram(
            f"{PREFIX}iteration_tokens", "Tokens that a step computed or sampled.", buckets.TOKENS, registry
        )
        registry.register(self)

    def stepped(self, events: Sequence[EngineEvent]) -> None:
        """Observe a step by its events; on the engine's thread, after the step."""
        sampled = sum(len(event.token_ids) for event in events if isinstance(event, TokensSampled))
        computed = self._snapshot().computed_prompt_tokens
        tokens = sampled + computed - self._computed_before
        self._computed_before = computed
        if sampled:
            self._batch_size.observe(sampled)
        if tokens:
            self._iteration_tokens.observe(tokens)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        now = self._snapshot()
        gauges = (now.running, now.waiting, now.awaiting_kv, now.pinned, now.quarantined)
        usage = 1 - now.free_pages / now.total_pages if now.total_pages else 0.0
        for (name, text), value in zip(
            _GAUGES.items(), (*gauges, now.queued_prefill_tokens, usage), strict=True
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        prefix = (now.prefix_query_tokens, now.prefix_hit_tokens)
        counters = (now.steps, *prefix, now.generated_tokens, now.preemptions, now.stale_commands)
        for (name, text), value in zip(_COUNTERS.items(), counters, strict=True):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield self._blocks(now)
        yield _by_source(now)
        yield _finished(now)
        yield self._cache_info(f"{PREFIX}kv_cache", "page_size_tokens", "full_pages", "sliding_pages")
        if self._vllm_names:
            yield self._cache_info("vllm:cache_config", "block_size", "num_gpu_blocks", "num_sliding_blocks")

    @staticmethod
    def _blocks(now: EngineSnapshot) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}kv_blocks",
            "KV pages by group of layers and by who holds them.",
            labels=("group", "state"),
        )
        for group, states in now.pages.items():
            for state, pages in states.items():
                family.add_metric((group, state), pages)
        return family

    def _cache_info(self, name: str, page_size: str, full: str, sliding: str) -> Metric:
        sizes = {
            page_size: self._settings.page_size_tokens,
            full: self._settings.full_pages,
            sliding: self._settings.sliding_pages,
        }
        return InfoMetricFamily(
            name, "Sizes of the KV cache.", value={key: str(value) for key, value in sizes.items()}
        )


def _by_source(now: EngineSnapshot) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}prompt_tokens_by_source", "Prompt tokens by where their KV came from.", labels=("source",)
    )
    family.add_metric(("local_compute",), now.computed_prompt_tokens)
    family.add_metric(("local_cache_hit",), now.prefix_hit_tokens)
    family.add_metric(("external_kv_transfer",), now.received_prompt_tokens)
    return family


def _finished(now: EngineSnapshot) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}sequences_finished",
        "Sequences that ended in this engine, by the reason.",
        labels=("reason",),
    )
    for reason in FinishReason:
        family.add_metric((reason.value,), now.finished.get(reason.value, 0))
    return family
