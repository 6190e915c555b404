"""Every metric that a router exports, declared once. Prefix ``antiphon_``; seconds, tokens and ratios.

Definitions that clients of the metrics rely on:

* time to first token: from the arrival of the HTTP request to the arrival of its first token at the router.
* inter-token latency: between two arrivals of tokens of one choice, divided by the tokens of the later one.
"""

from __future__ import annotations

from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopCounter, LoopHistogram
from antiphon.telemetry.registry import ProcessRegistry

TTFT_STAGES = (
    *("tokenize", "queue", "retry", "route", "reserve"),
    *("prefill_queue", "prefill", "transfer", "first_decode"),
)
"""Parts of the time to first token, in order: they add up to it, see ``request_timing``."""

STAGES = (*TTFT_STAGES, "detokenize")
"""``detokenize`` comes after: what turning the first token into an answer took."""

VLLM_NAMES = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "prompt_tokens": ("prompt_tokens",),
    "cached_tokens": ("prompt_tokens_cached",),
    "output_tokens": ("generation_tokens",),
    "request_success": ("request_success",),
}
"""What of vLLM's metrics a router has a counterpart of; those of an engine come from the workers."""


class RouterMetrics:
    """The metrics of one router, in a registry of their own. All carry the served model's name."""

    def __init__(self, model_name: str, *, vllm_names: bool = False) -> None:
        labels = {"model_name": model_name}
        self.registry = ProcessRegistry(labels, vllm_names=VLLM_NAMES if vllm_names else None)
        self._declare_requests()
        self._declare_tokens()
        self._declare_placement()
        self.registry.declare_build("router")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Series of what should not happen exist from the start: a share of failures is 0 then, and known."""
        for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            for status_code in ("200", "429", "500", "503", "504"):
                self.requests.labels(endpoint, status_code)
        for leg in ("prefill", "decode"):
            self.retries.labels(leg, "worker_lost")
        for reason in ("queue_full", "displaced", "deadline", "shutdown", "key_limit"):
            self.rejections.labels(reason)

    def _declare_requests(self) -> None:
        counter, gauge, histogram = self.registry.counter, self.registry.gauge, self.registry.histogram
        self.requests = counter(
            "requests", "HTTP requests answered, by endpoint and status.", "endpoint", "status_code"
        )
        self.request_errors = counter(
            "request_errors", "Requests that ended with an error, by its kind.", "error_type"
        )
        self.requests_in_flight = gauge("requests_in_flight", "Choices that hold an admission slot.")
        self.requests_queued = gauge("requests_queued", "Choices that wait for an admission slot.")
        self.rejections = counter("rejections", "Requests turned away at the door.", "reason")
        self.refusal_time = histogram(
            "refusal_seconds", "Arrival of a request turned away at the door to its answer.", buckets.STAGE_S
        )
        self.client_disconnects = counter(
            "client_disconnects", "Clients that left before the end, by the stage of the request.", "stage"
        )
        self.slow_clients = counter("slow_clients", "Clients cut off because they read too slowly.")
        self.finished = counter("request_success", "Choices that ended well.", "finished_reason")
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", buckets.LATENCY_S
        )
        self.queue_time = histogram("queue_time_seconds", "Wait for admission.", buckets.STAGE_S)
        self.stage_duration = histogram(
            "stage_duration_seconds", "Parts of a request's time.", buckets.STAGE_S, "stage"
        )

    def _declare_tokens(self) -> None:
        counter, histogram = self.registry.counter, self.registry.histogram
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", buckets.LATENCY_S
        )
        self.inter_token_latency = LoopHistogram(
            "antiphon_inter_token_latency_seconds",
            "Time between tokens of one choice.",
            buckets.ITL_S,
            self.registry,
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds",
            "First token to last token of a choice, per token after the first.",
            buckets.ITL_S,
        )
        self.prompt_tokens_per_request = histogram(
            "request_prompt_tokens", "Prompt tokens per choice.", buckets.TOKENS
        )
        self.generation_tokens_per_request = histogram(
            "request_generation_tokens", "Generated tokens per choice.", buckets.TOKENS
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of choices that ended.")
        self.output_tokens = LoopCounter(
            "antiphon_output_tokens", "Tokens received from decode workers.", self.registry
        )
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that a prefix cache held.")
        self.output_repairs = counter(
            "output_repairs", "Deviations of the model from its chat format that were tolerated.", "kind"
        )
        self.dropped_tools = counter(
            "dropped_tools", "Hosted tools that do not exist here, left out of the prompt.", "type"
        )

    def _declare_placement(self) -> None:
        counter, gauge = self.registry.counter, self.registry.gauge
        self.disagg_decisions = counter(
            "disagg_decisions", "Placement decisions: decode, prefill, or no prefill.", "decision", "reason"
        )
        self.retries = counter("retries", "Attempts that were started over.", "leg", "reason")
        self.worker_up = gauge("worker_up", "1 while the link to a worker stands.", "worker", "role")
        self.worker_circuit_state = gauge(
            "worker_circuit_state", "0 closed, 1 open, 2 half open.", "worker", "role"
        )
        self.worker_active = gauge(
            "worker_active_requests", "Requests running or waiting at a worker.", "worker", "role"
        )
        self.worker_kv_usage = gauge(
            "worker_kv_cache_usage_ratio", "Share of a worker's KV pages in use.", "worker", "role"
        )
        self.worker_queued_tokens = gauge(
            "worker_queued_prefill_tokens", "Prompt tokens that wait at a worker.", "worker", "role"
        )
        self.ready_pairs = gauge("ready_pairs", "Pairs of prefill and decode worker in use.")

    def worker_gone(self, worker_id: str, role: str) -> None:
        """The link to a worker ended: what was known of its load is so no longer, and it may never return."""
        self.worker_up.labels(worker_id, role).set(0)
        for known in (
            self.worker_circuit_state,
            self.worker_active,
            self.worker_kv_usage,
            self.worker_queued_tokens,
        ):
            known.remove(worker_id, role)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of all metrics and its content type; with exemplars for a client that ``accept``s them."""
        return self.registry.exposition(accept)
