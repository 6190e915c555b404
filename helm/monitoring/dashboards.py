"""The dashboards: which question each panel answers, and the expression that answers it.

Every expression uses only metrics and labels that the code exports, which a test holds. Panels about routers
are here; those of the other processes are in ``process_panels.py``, those of GPUs in ``gpu_panels.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_panels
import process_panels
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.models.dashboard import VariableRefresh
from panels import DATASOURCE, WINDOW, Panel, Query, density, lines, mean, number, quantiles, row

MODEL = 'model_name=~"$model"'
STAGES = "antiphon_stage_duration_seconds"
TTFT_STAGES = "tokenize|queue|retry|route|reserve|prefill_queue|prefill|transfer|first_decode"


def rate(metric: str, *, by: str = "", more: str = "") -> str:
    """Per second, over all routers."""
    group = f"sum by ({by}) " if by else "sum"
    return f"{group}(rate({metric}{{{MODEL}{more}}}[{WINDOW}]))"


def of_workers(metric: str, role: str, aggregation: str = "max") -> str:
    """A gauge of workers of one role; every router sees each of them, so routers are not added up."""
    return f'{aggregation} by (worker) ({metric}{{{MODEL}, role="{role}"}})'


def overview() -> list[Panel | builder.Row]:
    """Is it well, and how much does it do?"""
    return [
        number(
            "Ready pairs",
            "Pairs of a prefill and a decode worker that have moved a test page. 0 is an outage.",
            "none",
            Query(f"min(antiphon_ready_pairs{{{MODEL}}})"),
        ),
        *(
            number(
                f"{role.capitalize()} workers",
                f"{role.capitalize()} workers whose link stands, as the router sees it that sees the fewest.",
                "none",
                Query(f'min(sum by (instance) (antiphon_worker_up{{{MODEL}, role="{role}"}}))'),
            )
            for role in ("prefill", "decode")
        ),
        number(
            "In flight",
            "Choices that hold an admission slot.",
            "none",
            Query(f"sum(antiphon_requests_in_flight{{{MODEL}}})"),
        ),
        number(
            "Queued",
            "Choices that wait for an admission slot.",
            "none",
            Query(f"sum(antiphon_requests_queued{{{MODEL}}})"),
        ),
        number(
            "Generated tokens",
            "Tokens per second received from decode workers.",
            "short",
            Query(rate("antiphon_output_tokens_total")),
        ),
        lines(
            "Time to first token",
            "From the arrival of the HTTP request to its first token at the router.",
            "s",
            *quantiles("antiphon_time_to_first_token_seconds", MODEL, 0.5, 0.9, 0.99),
        ),
        lines(
            "Inter-token latency",
            "Between two tokens of one answer.",
            "s",
            *quantiles("antiphon_inter_token_latency_seconds", MODEL, 0.5, 0.9, 0.99),
            mean("antiphon_time_per_output_token_seconds", MODEL, legend="mean of requests"),
        ),
        lines(
            "Requests by status",
            "HTTP answers per second.",
            "reqps",
            Query(rate("antiphon_requests_total", by="status_code"), "{{status_code}}"),
        ),
        lines(
            "Ends",
            "Answers per second that ended well, by their reason.",
            "reqps",
            Query(rate("antiphon_request_success_total", by="finished_reason"), "{{finished_reason}}"),
        ),
        lines(
            "Tokens per second",
            "Prompt tokens are counted when a request ends, generated ones as they come.",
            "short",
            Query(rate("antiphon_prompt_tokens_total"), "prompt"),
            Query(rate("antiphon_cached_tokens_total"), "prompt, from a prefix cache"),
            Query(rate("antiphon_output_tokens_total"), "generated"),
        ),
        lines(
            "Whole requests",
            "From arrival to end.",
            "s",
            *quantiles("antiphon_e2e_request_latency_seconds", MODEL, 0.5, 0.99),
        ),
        *process_panels.members(),
    ]


def balance() -> list[Panel | builder.Row]:
    """Which pool is short, and what would be enough?"""
    busy = f'sum(rate({STAGES}_sum{{{MODEL}, stage="prefill"}}[{WINDOW}]))'
    workers = f'sum(max by (worker) (antiphon_worker_up{{{MODEL}, role="prefill"}}))'
    return [
        row("Prefill is short when the first row grows while the second does not"),
        lines(
            "Prompt tokens waiting at each prefill worker",
            "A prefill worker computes one prompt at a time; what waits is time to first token.",
            "short",
            Query(of_workers("antiphon_worker_queued_prefill_tokens", "prefill"), "{{worker}}"),
        ),
        lines(
            "Prefill workers needed and there",
            "Seconds of prefill asked for per second is the number of workers that are busy all the time.",
            "none",
            Query(busy, "busy on average"),
            Query(workers, "there"),
        ),
        row("Decode is short when this row grows: KV fills up, and requests wait for pages"),
        lines(
            "KV pages in use at each decode worker",
            "Nothing is prefilled before its pages are reserved, so a full cache shows as waiting below.",
            "percentunit",
            Query(of_workers("antiphon_worker_kv_cache_usage_ratio", "decode"), "{{worker}}"),
            maximum=1,
        ),
        lines(
            "Wait for a reservation",
            "Time until a decode worker has reserved pages.",
            "s",
            *quantiles(f"{STAGES}", f'{MODEL}, stage="reserve"', 0.5, 0.99),
        ),
        row("What each worker has to do"),
        *(
            lines(
                f"Requests at each {role} worker",
                "Running or waiting there.",
                "none",
                Query(of_workers("antiphon_worker_active_requests", role), "{{worker}}"),
            )
            for role in ("prefill", "decode")
        ),
        lines(
            "Wait for a prefill worker and prefill itself",
            "Mean seconds of a request.",
            "s",
            mean(STAGES, f'{MODEL}, stage=~"prefill_queue|prefill"', by="stage"),
        ),
        lines(
            "Where requests were sent",
            "Placement decisions per second, with the reason; no_prefill needed no prefill at all.",
            "reqps",
            Query(rate("antiphon_disagg_decisions_total", by="decision, reason"), "{{decision}}: {{reason}}"),
        ),
        *process_panels.pools(),
    ]


def transfer() -> list[Panel | builder.Row]:
    """Does KV get across in time?"""
    moved = f'{MODEL}, stage="transfer"'
    share = (
        f"sum(rate({STAGES}_sum{{{moved}}}[{WINDOW}]))"
        f" / sum(rate(antiphon_time_to_first_token_seconds_sum{{{MODEL}}}[{WINDOW}]))"
    )
    return [
        lines(
            "Transfer after prefill",
            "The tail of the transfer that computing did not hide.",
            "s",
            *quantiles(STAGES, moved, 0.5, 0.9, 0.99),
        ),
        lines(
            "Share of the time to first token",
            "Transfer that was waited for, of all time to first token. High values mean a slow path.",
            "percentunit",
            Query(share, "transfer"),
        ),
        density("Transfer after prefill", "Each request's exposed tail.", STAGES, moved),
        lines(
            "Attempts started over",
            "Per second, by the leg that failed and why; a lost transfer is one of the reasons.",
            "reqps",
            Query(rate("antiphon_retries_total", by="leg, reason"), "{{leg}}: {{reason}}"),
        ),
        lines(
            "KV pages in use at each prefill worker",
            "Pages are held until they are shipped, so a slow path fills them.",
            "percentunit",
            Query(of_workers("antiphon_worker_kv_cache_usage_ratio", "prefill"), "{{worker}}"),
            maximum=1,
        ),
        lines(
            "Ready pairs at each router",
            "Pairs of workers that have moved a test page.",
            "none",
            Query(f"antiphon_ready_pairs{{{MODEL}}}", "{{instance}}"),
        ),
        *process_panels.transfers(),
    ]


def anatomy() -> list[Panel | builder.Row]:
    """What is the time made of?"""
    return [
        lines(
            "Time to first token by its parts",
            "Mean seconds per request of the parts, which follow each other.",
            "s",
            mean(STAGES, f'{MODEL}, stage=~"{TTFT_STAGES}"', by="stage"),
            stacked=True,
            width=24,
        ),
        lines(
            "Slowest 1 % of each part",
            "The 99th percentile of each part; these do not add up.",
            "s",
            *quantiles(STAGES, f'{MODEL}, stage=~"{TTFT_STAGES}"', 0.99, by="stage"),
        ),
        lines(
            "Admission and parsing",
            "Wait at the door, and what turning the first token into an answer took.",
            "s",
            Query(mean("antiphon_queue_time_seconds", MODEL).expression, "admission"),
            Query(mean(STAGES, f'{MODEL}, stage="detokenize"').expression, "parsing of the first token"),
        ),
        density(
            "Time to first token",
            "All requests.",
            "antiphon_time_to_first_token_seconds",
            MODEL,
        ),
        density("Inter-token latency", "All tokens.", "antiphon_inter_token_latency_seconds", MODEL),
        density("Prompt tokens", "Per choice.", "antiphon_request_prompt_tokens", MODEL, unit="short"),
        density("Generated tokens", "Per choice.", "antiphon_request_generation_tokens", MODEL, unit="short"),
        *process_panels.stages(),
    ]


def errors() -> list[Panel | builder.Row]:
    """What went wrong, and what was mended?"""
    return [
        lines(
            "Errors",
            "Requests per second that ended with an error, by its code.",
            "reqps",
            Query(rate("antiphon_request_errors_total", by="error_type"), "{{error_type}}"),
        ),
        lines(
            "Server errors",
            "Share of answers with a status of 500 and above.",
            "percentunit",
            Query(
                rate("antiphon_requests_total", more=', status_code=~"5.."')
                + " / "
                + rate("antiphon_requests_total"),
                "5xx",
            ),
        ),
        lines(
            "Turned away",
            "Requests per second refused at the door.",
            "reqps",
            Query(rate("antiphon_rejections_total", by="reason"), "{{reason}}"),
        ),
        lines(
            "Time to turn away",
            "From the arrival of a request to its 429 or 503: overload must be said at once.",
            "s",
            *quantiles("antiphon_refusal_seconds", MODEL, 0.5, 0.95),
        ),
        lines(
            "Clients gone",
            "Clients per second that left before the end, by how far their request was, or were cut off.",
            "reqps",
            Query(rate("antiphon_client_disconnects_total", by="stage"), "left while {{stage}}"),
            Query(rate("antiphon_slow_clients_total"), "read too slowly"),
        ),
        lines(
            "Attempts started over",
            "Requests that went on elsewhere without their client noticing.",
            "reqps",
            Query(rate("antiphon_retries_total", by="leg, reason"), "{{leg}}: {{reason}}"),
        ),
        lines(
            "Circuits",
            "0 closed, 1 open, 2 half open.",
            "none",
            Query(f"max by (role, worker) (antiphon_worker_circuit_state{{{MODEL}}})", "{{worker}}"),
        ),
        lines(
            "Repairs of the chat format",
            "Deviations of the model per second that were tolerated, by kind.",
            "ops",
            Query(rate("antiphon_output_repairs_total", by="kind"), "{{kind}}"),
        ),
        lines(
            "Hosted tools left out",
            "Tools per second that do not exist here and were not shown to the model.",
            "ops",
            Query(rate("antiphon_dropped_tools_total", by="type"), "{{type}}"),
        ),
        *process_panels.ends(),
    ]


DASHBOARDS: dict[str, tuple[str, Callable[[], list[Panel | builder.Row]]]] = {
    "overview": ("Antiphon: overview", overview),
    "pd-balance": ("Antiphon: prefill and decode", balance),
    "kv-transfer": ("Antiphon: KV transfer", transfer),
    "latency-anatomy": ("Antiphon: latency anatomy", anatomy),
    "errors-and-repairs": ("Antiphon: errors and repairs", errors),
    "gpu": ("Antiphon: GPUs", gpu_panels.gpu),
}
"""File name -> title and panels."""


def build(name: str) -> builder.Dashboard:
    """One dashboard, ready to be encoded."""
    title, panels = DASHBOARDS[name]
    board = (
        builder.Dashboard(title)
        .uid(f"antiphon-{name}")
        .tags(["antiphon"])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .description((panels.__doc__ or "").strip())
        .with_variable(builder.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    if name != "gpu":
        board.with_variable(
            builder.QueryVariable("model")
            .label("Model")
            .datasource(DATASOURCE)
            .query("label_values(antiphon_build_info, model_name)")
            .include_all(True)
            .all_value(".+")
            .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        )
    for place, panel in enumerate(panels(), start=1):
        panel.id(place)
        if isinstance(panel, builder.Row):
            board.with_row(panel)
        else:
            board.with_panel(panel)
    return board
