"""Every metric that a router exports, declared once. Prefix ``antiphon_``; seconds, tokens and ratios.

Definitions that clients of the metrics rely on:

* time to first token: from the arrival of the HTTP request to the arrival of its first token at the router.
* inter-token latency: between two arrivals of tokens of one choice, divided by the tokens of the later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from antiphon.router.loop_metrics import LoopCounter, LoopHistogram

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
STAGE_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 300.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 131_072,
)  # fmt: skip

STAGES = ("tokenize", "queue", "route", "reserve", "prefill_queue", "prefill", "transfer", "first_decode")
"""Parts of the time to first token, in order; ``detokenize`` is observed as well, over the whole answer."""


VLLM_NAMES = {
    "requests_in_flight": ("num_requests_running",),
    "requests_queued": ("num_requests_waiting",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_tokens": ("prompt_tokens_cached", "prefix_cache_hits"),
    "generation_tokens": ("generation_tokens",),
    "request_success": ("request_success",),
    "worker_kv_cache_usage_ratio": ("kv_cache_usage_perc",),
}
"""What of vLLM's metrics has a counterpart here; those of workers have the labels ``worker`` and ``role``."""


class _ModelRegistry(CollectorRegistry):
    """Adds ``model_name`` to every sample when it is read, so that no update pays for it.

    With ``vllm_names``, metrics of ``VLLM_NAMES`` are there a second time under those names.
    """

    def __init__(self, model_name: str, *, vllm_names: bool) -> None:
        super().__init__()
        self._model_name = model_name
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [
                sample._replace(labels={"model_name": self._model_name, **sample.labels})
                for sample in metric.samples
                # When a series began is of no use to anyone here, and a series of its own.
                if not sample.name.endswith("_created")
            ]
            yield metric
            if self._vllm_names:
                for name in VLLM_NAMES.get(metric.name.removeprefix("antiphon_"), ()):
                    yield _renamed(metric, f"vllm:{name}")


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit if name.endswith(metric.unit) else "")
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return copy


class RouterMetrics:
    """The metrics of one router, in a registry of their own. All carry the served model's name."""

    def __init__(self, model_name: str, *, vllm_names: bool = False) -> None:
        self.registry = _ModelRegistry(model_name, vllm_names=vllm_names)
        self._declare_requests()
        self._declare_tokens()
        self._declare_placement()
        info = Info("antiphon_build", "Version of this process.", registry=self.registry)
        info.info({"version": version("antiphon"), "role": "router"})

    def _declare_requests(self) -> None:
        self.requests = self._counter(
            "requests", "HTTP requests answered, by endpoint and status.", "endpoint", "status_code"
        )
        self.request_errors = self._counter(
            "request_errors", "Requests that ended with an error, by its kind.", "error_type"
        )
        self.requests_in_flight = self._gauge("requests_in_flight", "Choices that hold an admission slot.")
        self.requests_queued = self._gauge("requests_queued", "Choices that wait for an admission slot.")
        self.rejections = self._counter("rejections", "Requests turned away at the door.", "reason")
        self.client_disconnects = self._counter(
            "client_disconnects", "Clients that left before the end, by the stage of the request.", "stage"
        )
        self.slow_clients = self._counter("slow_clients", "Clients cut off because they read too slowly.")
        self.finished = self._counter("request_success", "Choices that ended well.", "finished_reason")
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", LATENCY_BUCKETS_S
        )
        self.queue_time = self._histogram("queue_time_seconds", "Wait for admission.", STAGE_BUCKETS_S)
        self.stage_duration = self._histogram(
            "stage_duration_seconds", "Parts of a request's time.", STAGE_BUCKETS_S, "stage"
        )

    def _declare_tokens(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", LATENCY_BUCKETS_S
        )
        self.inter_token_latency = LoopHistogram(
            "antiphon_inter_token_latency_seconds",
            "Time between tokens of one choice.",
            ITL_BUCKETS_S,
            self.registry,
        )
        self.prompt_tokens_per_request = self._histogram(
            "request_prompt_tokens", "Prompt tokens per choice.", TOKEN_BUCKETS
        )
        self.generation_tokens_per_request = self._histogram(
            "request_generation_tokens", "Generated tokens per choice.", TOKEN_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of choices that ended.")
        self.generation_tokens = LoopCounter(
            "antiphon_generation_tokens", "Tokens received from decode workers.", self.registry
        )
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that a prefix cache held.")
        self.output_repairs = self._counter(
            "output_repairs", "Deviations of the model from its chat format that were tolerated.", "kind"
        )
        self.dropped_tools = self._counter(
            "dropped_tools", "Hosted tools that do not exist here, left out of the prompt.", "type"
        )

    def _declare_placement(self) -> None:
        self.disagg_decisions = self._counter(
            "disagg_decisions", "Placement decisions: decode, prefill, or no prefill.", "decision", "reason"
        )
        self.retries = self._counter("retries", "Attempts that were started over.", "leg", "reason")
        self.worker_up = self._gauge("worker_up", "1 while the link to a worker stands.", "worker", "role")
        self.worker_circuit_state = self._gauge(
            "worker_circuit_state", "0 closed, 1 open, 2 half open.", "worker", "role"
        )
        self.worker_active = self._gauge(
            "worker_active_requests", "Requests running or waiting at a worker.", "worker", "role"
        )
        self.worker_kv_usage = self._gauge(
            "worker_kv_cache_usage_ratio", "Share of a worker's KV pages in use.", "worker", "role"
        )
        self.worker_queued_tokens = self._gauge(
            "worker_queued_prefill_tokens", "Prompt tokens that wait at a worker.", "worker", "role"
        )
        self.ready_pairs = self._gauge("ready_pairs", "Pairs of prefill and decode worker in use.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"antiphon_{name}", text, labels, buckets=buckets, registry=self.registry)

    def exposition(self) -> tuple[bytes, str]:
        """The text of all metrics and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
