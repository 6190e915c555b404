"""The alert rules: what is watched, when it wakes somebody, what causes it, and which page says what to do.

Objectives are placeholders, in ``DEFAULTS``, that the chart fills in from its values; so is the place of
docs/operations/. Every alert is a heading of runbook.md there.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

DEFAULTS = {
    "@TTFT_SECONDS@": "2.0",
    "@ITL_SECONDS@": "0.05",
    "@TRANSFER_BYTES_PER_SECOND@": "1e+06",
    "@TCP_PEERS_ALLOWED@": "0",
    "@RUNBOOKS@": "docs/operations/",
}
OBJECTIVE_MISSED = 0.01
"""Share of requests, or of tokens, that may be slower than the objective: 99 % must not be."""
ERRORS_ALLOWED = 0.001
STAGES = "antiphon_stage_duration_seconds"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. ``summary`` names what is seen, ``cause`` what is usually behind it."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str
    cause: str


def slower_than(metric: str, bound: str, window: str) -> str:
    """Share of a histogram's observations above a bound of its buckets, per model."""
    return (
        f'(1 - sum by (model_name) (rate({metric}_bucket{{le="{bound}"}}[{window}]))'
        f" / sum by (model_name) (rate({metric}_count[{window}])))"
    )


def failed(window: str) -> str:
    """Share of answers with a status of 500 and above, per model."""
    return (
        f'(sum by (model_name) (rate(antiphon_requests_total{{status_code=~"5.."}}[{window}]))'
        f" / sum by (model_name) (rate(antiphon_requests_total[{window}])))"
    )


def burn(share: str, allowed: float, factor: float, long: str, short: str) -> str:
    """The budget of a month burns ``factor`` times too fast: over a long window, and still now."""
    limit = f"{factor * allowed:g}"
    return f"{share.replace('@W@', long)} > {limit} and {share.replace('@W@', short)} > {limit}"


def objectives() -> list[Alert]:
    """Budgets of slow and of failed requests, each by a fast and by a slow burn."""
    kinds = (
        (
            "Ttft",
            slower_than("antiphon_time_to_first_token_seconds", "@TTFT_SECONDS@", "@W@"),
            OBJECTIVE_MISSED,
            "the time to first token is above @TTFT_SECONDS@ s for too many requests",
            "a backlog of prompts, KV pages running out, or a slow transfer; latency anatomy shows which",
        ),
        (
            "Itl",
            slower_than("antiphon_inter_token_latency_seconds", "@ITL_SECONDS@", "@W@"),
            OBJECTIVE_MISSED,
            "tokens follow each other more slowly than @ITL_SECONDS@ s too often",
            "decode batches that are too large, preemption, or a GPU that throttles",
        ),
        (
            "Error",
            failed("@W@"),
            ERRORS_ALLOWED,
            "too many requests end with a status of 500 and above",
            "dead workers beyond router.max_attempts, no ready pair, or deadlines",
        ),
    )
    speeds = (("Fast", 14.4, "1h", "5m", "2m", "critical"), ("Slow", 6.0, "6h", "30m", "15m", "warning"))
    return [
        Alert(
            f"Antiphon{kind}Budget{speed}Burn",
            burn(share, allowed, factor, long, short),
            wait,
            severity,
            f"{{{{ $labels.model_name }}}}: {summary}",
            cause,
        )
        for kind, share, allowed, summary, cause in kinds
        for speed, factor, long, short, wait, severity in speeds
    ]


def health() -> list[Alert]:
    """Something is down or full."""
    return [
        Alert(
            "AntiphonNoReadyPair",
            "max by (model_name) (antiphon_ready_pairs) == 0",
            "2m",
            "critical",
            "{{ $labels.model_name }}: no pair of workers can work together; requests are answered with 503",
            "a whole pool is down or loading, or no test page gets across between the pools",
        ),
        Alert(
            "AntiphonMetricsMissing",
            'absent(antiphon_build_info{role="router"})',
            "5m",
            "critical",
            "no router is scraped",
            "routers are down, or the scrape configuration does not find them",
        ),
        Alert(
            "AntiphonWorkerDown",
            # A worker that left its pool for good is no member any more, and routers cannot tell.
            "min by (model_name, role, worker) (antiphon_worker_up) == 0"
            " and on (model_name, role, worker) antiphon_member_up",
            "5m",
            "warning",
            "{{ $labels.worker }} ({{ $labels.role }}) is not linked to a router",
            "it is loading, dies again and again, or its node is gone",
        ),
        Alert(
            "AntiphonCircuitOpen",
            "max by (model_name, role, worker) (antiphon_worker_circuit_state) == 1",
            "5m",
            "warning",
            "routers avoid {{ $labels.worker }} ({{ $labels.role }})",
            "it fails at requests that other workers then serve",
        ),
        Alert(
            "AntiphonQueueFull",
            'sum by (model_name) (rate(antiphon_rejections_total{reason=~"queue_full|displaced"}[5m])) > 0',
            "5m",
            "warning",
            "{{ $labels.model_name }}: requests are answered with 429",
            "more load than the pools can serve; prefill and decode shows which pool is short",
        ),
        Alert(
            "AntiphonPrefillBacklog",
            f"histogram_quantile(0.9, sum by (model_name, le) (rate({STAGES}_bucket"
            '{stage="prefill_queue"}[10m]))) > 5',
            "10m",
            "warning",
            "{{ $labels.model_name }}: prompts wait {{ $value | humanizeDuration }} for a prefill worker",
            "too few prefill workers for the prompts that come",
        ),
        Alert(
            "AntiphonDecodeCacheFull",
            "min by (model_name) (max by (model_name, worker) "
            '(antiphon_worker_kv_cache_usage_ratio{role="decode"})) > 0.95',
            "10m",
            "warning",
            "{{ $labels.model_name }}: every decode worker's KV pages are in use",
            "too few decode workers or too few pages for the requests in flight",
        ),
        Alert(
            "AntiphonTransferSlow",
            f"histogram_quantile(0.9, sum by (model_name, le) (rate({STAGES}_bucket"
            '{stage="transfer"}[10m]))) > 1',
            "10m",
            "warning",
            "{{ $labels.model_name }}: KV arrives {{ $value | humanizeDuration }} after its prefill",
            "the transfer fell back to TCP, or the network is saturated",
        ),
    ]


def processes() -> list[Alert]:
    """What workers and the supervisor say of themselves."""
    sent, took = (
        f"sum by (model_name, engine) (rate(antiphon_kv_transfer_{part}_sum[10m]))"
        for part in ("bytes", "seconds")
    )
    return [
        Alert(
            "AntiphonPoolDown",
            "sum by (model_name, role) (antiphon_member_up) == 0",
            "2m",
            "critical",
            "{{ $labels.model_name }}: no {{ $labels.role }} process runs",
            "all of the pool's pods are gone, or each life dies while it starts",
        ),
        Alert(
            "AntiphonRestarting",
            "sum by (model_name, worker) (increase(antiphon_member_restarts_total[30m])) > 3",
            "5m",
            "warning",
            "{{ $labels.worker }} was started {{ $value | humanize }} times within half an hour",
            "an error that comes back with every life: memory, a GPU, a node, or a request that kills it",
        ),
        Alert(
            "AntiphonPagesLeaking",
            "sum by (model_name, engine) (antiphon_kv_pages_held) > 0"
            " and sum by (model_name, engine) (antiphon_worker_requests) == 0",
            "10m",
            "warning",
            "{{ $labels.engine }} holds {{ $value | humanize }} KV pages for no request",
            "a defect: pages that nobody gave back",
        ),
        Alert(
            "AntiphonTransferFallback",
            "sum by (model_name, engine) (antiphon_kv_peers_over_tcp) > @TCP_PEERS_ALLOWED@",
            "5m",
            "warning",
            "KV of {{ $value }} peers reaches {{ $labels.engine }} over TCP",
            "UCX found no better path without a word: the pods do not share GPUs or have no RDMA device",
        ),
        Alert(
            "AntiphonSlowWrites",
            f"{sent} / {took} < @TRANSFER_BYTES_PER_SECOND@",
            "10m",
            "warning",
            "KV leaves {{ $labels.engine }} at {{ $value | humanize }}B/s",
            "many small runs, a network that is saturated, or a fallback to a slower path",
        ),
    ]


def repairs() -> list[Alert]:
    """It works, because something is mended all the time."""
    return [
        Alert(
            "AntiphonRetriesRising",
            "sum by (model_name) (rate(antiphon_retries_total[15m]))"
            " / sum by (model_name) (rate(antiphon_disagg_decisions_total[15m])) > 0.02",
            "15m",
            "warning",
            "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of attempts are started over",
            "a worker that dies or refuses, lost transfers, or preemption for want of pages",
        ),
        Alert(
            "AntiphonRepairsRising",
            "sum by (model_name) (rate(antiphon_output_repairs_total[30m]))"
            " / sum by (model_name) (rate(antiphon_request_success_total[30m])) > 0.1",
            "30m",
            "warning",
            "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of answers leave the chat format",
            "a damaged or changed checkpoint, wrong numerics, or prompts that lead the model astray",
        ),
    ]


GROUPS = {
    "antiphon-objectives": objectives,
    "antiphon-health": health,
    "antiphon-processes": processes,
    "antiphon-repairs": repairs,
}


def render() -> str:
    """The rules as the ``spec`` of a PrometheusRule, with placeholders."""
    groups = [
        {
            "name": name,
            "rules": [
                {
                    "alert": alert.name,
                    "expr": alert.expression,
                    "for": alert.wait,
                    "labels": {"severity": alert.severity},
                    "annotations": {
                        "summary": alert.summary,
                        "cause": alert.cause,
                        "runbook_url": f"@RUNBOOKS@runbook.md#{alert.name.lower()}",
                    },
                }
                for alert in rules()
            ],
        }
        for name, rules in GROUPS.items()
    ]
    return yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)


def filled_in(text: str) -> str:
    """The rules with default objectives, for a Prometheus without the chart."""
    for placeholder, value in DEFAULTS.items():
        text = text.replace(placeholder, value)
    return text
