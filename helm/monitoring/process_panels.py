"""Panels about what workers and the supervisor say of themselves; ``dashboards.py`` is about routers."""

from __future__ import annotations

from panels import WINDOW, Panel, Query, density, lines, mean, quantiles

MODEL = 'model_name=~"$model"'
BUSY_PAGES = 0.8
"""Share of a decode worker's pages that is full load: the rest absorbs what grows."""


def gauge(metric: str, *, by: str, more: str = "", aggregation: str = "sum") -> str:
    """A gauge over processes."""
    return f"{aggregation} by ({by}) (antiphon_{metric}{{{MODEL}{more}}})"


def rate(metric: str, *, by: str = "", more: str = "") -> str:
    """A counter per second over processes."""
    group = f"sum by ({by}) " if by else "sum"
    return f"{group}(rate(antiphon_{metric}{{{MODEL}{more}}}[{WINDOW}]))"


def of_engines(title: str, text: str, unit: str, metric: str, *, more: str = "") -> Panel:
    """A gauge of each engine."""
    return lines(title, text, unit, Query(gauge(metric, by="engine", more=more), "{{engine}}"))


def members() -> list[Panel]:
    """Processes as the supervisor sees them."""
    return [
        lines(
            "Processes",
            "By role and by where they stand; everything but running should be 0 for most of the time.",
            "none",
            Query(gauge("members", by="role, state"), "{{role}}: {{state}}"),
        ),
        lines(
            "Restarts",
            "Lives after the first, per second; the other curve rises with each process that comes or goes.",
            "none",
            Query(rate("member_restarts_total", by="worker"), "{{worker}}"),
            Query(f"max(antiphon_topology_version{{{MODEL}}})", "version of the topology"),
        ),
        lines(
            "Up and ready",
            "Processes that run, and of them those that can do their part of a request.",
            "none",
            Query(gauge("member_up", by="role"), "{{role}} up"),
            Query(gauge("member_ready", by="role"), "{{role}} ready"),
        ),
        lines(
            "Held by each process",
            "Requests, and KV pages of requests, when the supervisor last asked.",
            "none",
            Query(gauge("member_requests", by="worker"), "{{worker}}: requests"),
            Query(gauge("member_pages_held", by="worker"), "{{worker}}: pages"),
        ),
    ]


def pools() -> list[Panel]:
    """Queues, pages and steps of the engines."""
    busy = rate("request_prefill_time_seconds_sum")
    # A pool without pages in use, or without a process, asks for no ratio, rather than for an infinite one.
    filled = f'sum(antiphon_kv_cache_usage_perc{{{MODEL}, role="decode"}}) > 0'
    return [
        lines(
            "Prefill workers for each decode worker",
            "What the present load asks for: seconds of prefill per second, over decode workers whose pages "
            f"would be {BUSY_PAGES:.0%} full; and what there is.",
            "none",
            Query(f"{busy} / (({filled}) / {BUSY_PAGES})", "wanted"),
            Query(
                f'sum(antiphon_member_up{{{MODEL}, role="prefill"}})'
                f' / (sum(antiphon_member_up{{{MODEL}, role="decode"}}) > 0)',
                "there",
            ),
        ),
        lines(
            "Sequences",
            "By what they wait for: pages, KV of a peer, to be shipped, a peer that may still write.",
            "none",
            Query(gauge("num_requests_running", by="role"), "{{role}}: computing"),
            Query(gauge("num_requests_waiting", by="role"), "{{role}}: waiting for pages"),
            Query(gauge("num_requests_awaiting_kv", by="role"), "{{role}}: waiting for KV"),
            Query(gauge("num_requests_pinned", by="role"), "{{role}}: being shipped"),
            Query(gauge("num_requests_quarantined", by="role"), "{{role}}: quarantined"),
        ),
        of_engines(
            "Prompt tokens to compute", "Not computed yet, by engine.", "short", "queued_prefill_tokens"
        ),
        of_engines("KV pages in use", "Share of the full group.", "percentunit", "kv_cache_usage_perc"),
        lines(
            "KV pages of decode workers by state",
            "Of full-attention layers. Cached pages are given up when somebody needs them.",
            "none",
            Query(gauge("kv_blocks", by="state", more=', role="decode", group="full"'), "{{state}}"),
            stacked=True,
        ),
        lines(
            "KV pages held",
            "By requests, quarantined ones included; 0 when nothing runs, or pages leak.",
            "none",
            Query(gauge("kv_pages_held", by="engine"), "{{engine}}"),
        ),
        lines(
            "Steps",
            "Per second, by engine.",
            "ops",
            Query(rate("engine_steps_total", by="engine"), "{{engine}}"),
        ),
        lines(
            "Sequences and tokens of a step",
            "Mean over steps; a larger batch is a better use of the weights that a step reads.",
            "none",
            Query(mean("antiphon_batch_size", MODEL).expression, "sequences sampled for"),
            mean("antiphon_iteration_tokens", MODEL, by="role"),
        ),
        lines(
            "Tokens sampled",
            "Per second, by decode worker.",
            "short",
            Query(rate("generation_tokens_total", by="engine"), "{{engine}}"),
        ),
        lines(
            "Prompt tokens by where their KV came from",
            "Per second and role.",
            "short",
            Query(rate("prompt_tokens_by_source_total", by="role, source"), "{{role}}: {{source}}"),
        ),
        lines(
            "Prefix cache hits",
            "Share of looked-up prompt tokens.",
            "percentunit",
            Query(
                rate("prefix_cache_hits_total", by="role")
                + " / "
                + rate("prefix_cache_queries_total", by="role"),
                "{{role}}",
            ),
        ),
        lines(
            "Preemptions",
            "Sequences per second that gave their pages back for want of pages.",
            "ops",
            Query(rate("preemptions_total", by="engine"), "{{engine}}"),
        ),
        lines(
            "Workers",
            "Ready ones, those that drain, and the requests that they hold.",
            "none",
            Query(gauge("worker_ready", by="role"), "{{role}}: ready"),
            Query(gauge("worker_draining", by="role"), "{{role}}: draining"),
            Query(gauge("worker_requests", by="role"), "{{role}}: requests"),
        ),
    ]


def transfers() -> list[Panel]:
    """Single writes, what a request waits for, and what goes wrong between peers."""
    return [
        lines(
            "KV sent",
            "Bytes per second, by prefill worker, and those that are known to have arrived.",
            "Bps",
            Query(rate("kv_transfer_bytes_sum", by="engine"), "{{engine}}: written"),
            Query(rate("kv_sent_bytes_total", by="engine"), "{{engine}}: arrived"),
        ),
        lines(
            "Single writes",
            "From posting to seeing them done, and the posting alone.",
            "s",
            *quantiles("antiphon_kv_transfer_seconds", MODEL, 0.5, 0.99),
            Query(
                quantiles("antiphon_kv_transfer_post_seconds", MODEL, 0.99)[0].expression, "p99 of posting"
            ),
        ),
        lines(
            "Size of a write",
            "Mean bytes; the links need large ones.",
            "bytes",
            mean("antiphon_kv_transfer_bytes", MODEL),
        ),
        lines(
            "Runs in a write, and writes under way",
            "Mean number of separate byte runs: few and large is fast. Writes whose source is computed.",
            "none",
            Query(mean("antiphon_kv_transfer_descriptors", MODEL).expression, "runs"),
            Query(gauge("kv_transfers_in_flight", by="engine"), "{{engine}}: under way"),
        ),
        lines(
            "Speed of writes",
            "Bytes per second while a write is under way; a silent fallback to TCP shows here.",
            "Bps",
            Query(
                rate("kv_transfer_bytes_sum", by="engine")
                + " / "
                + rate("kv_transfer_seconds_sum", by="engine"),
                "{{engine}}",
            ),
        ),
        density("Bytes of a write", "All writes.", "antiphon_kv_transfer_bytes", MODEL, unit="bytes"),
        lines(
            "What requests wait for",
            "The exposed tail as prefill workers see it; permission to last page, as decode workers do.",
            "s",
            *(
                Query(quantiles(f"antiphon_request_{name}", MODEL, 0.9)[0].expression, f"p90 {text}")
                for name, text in (
                    ("transfer_tail_seconds", "exposed tail"),
                    ("kv_receive_seconds", "receiving"),
                )
            ),
        ),
        lines(
            "Attempts whose KV arrived, and was lost",
            "Per second; lost ones are computed again.",
            "ops",
            Query(rate("kv_received_requests_total"), "arrived"),
            Query(rate("kv_lost_requests_total"), "lost"),
        ),
        lines(
            "Failed transfers",
            "Per second, by stage and reason.",
            "ops",
            Query(rate("kv_transfer_failures_total", by="stage, reason"), "{{stage}}: {{reason}}"),
        ),
        lines(
            "Handshakes and peers",
            "Handshakes per second by result, and peers that have passed one.",
            "none",
            Query(rate("kv_handshakes_total", by="result"), "{{result}}"),
            Query(gauge("kv_peers", by="engine"), "{{engine}}: peers"),
            Query(gauge("kv_peers_mapped", by="engine"), "{{engine}}: written by their GPUs"),
            Query(gauge("kv_peers_over_tcp", by="engine"), "{{engine}}: over TCP"),
        ),
        lines(
            "Slowest path in the self-test",
            "Bytes a second at which the probe of a handshake arrived; the lowest of a worker's peers.",
            "Bps",
            Query(gauge("kv_slowest_path_bytes_per_second", by="engine"), "{{engine}}"),
        ),
        lines(
            "Late, missing, ended",
            "Per second: notifications nobody waited for, writes asked for again, rights ended by a death.",
            "ops",
            Query(rate("kv_late_notifications_total"), "late notifications"),
            Query(rate("kv_missing_writes_total"), "asked for again"),
            Query(rate("kv_lease_expired_total"), "ended by a death"),
        ),
        lines(
            "Peers past their lease",
            "They may still write, so their pages stay set aside until the supervisor has ended them.",
            "none",
            Query(gauge("kv_overdue_writers", by="engine"), "{{engine}}"),
        ),
    ]


def stages() -> list[Panel]:
    """What workers measured of a request."""
    parts = (
        ("reserve_seconds", "wait for pages"),
        ("prefill_queue_seconds", "wait for the first chunk"),
        ("prefill_time_seconds", "prefill"),
        ("first_step_seconds", "first step"),
        ("decode_time_seconds", "decode"),
    )
    return [
        lines(
            "Measured by workers",
            "Mean seconds of a request.",
            "s",
            *(Query(mean(f"antiphon_request_{name}", MODEL).expression, text) for name, text in parts),
        ),
        lines(
            "Prompt tokens computed for a request",
            "Mean; cached ones left out.",
            "short",
            mean("antiphon_request_prefill_kv_computed_tokens", MODEL),
        ),
    ]


def ends() -> list[Panel]:
    """How sequences end, and what workers count besides."""
    return [
        lines(
            "Ends of sequences",
            "Per second, by role and reason; in prefill, stop is the good end.",
            "ops",
            Query(rate("sequences_finished_total", by="role, reason"), "{{role}}: {{reason}}"),
        ),
        lines(
            "What workers count",
            "Events per second: stale messages, repeats, resends, cancellations.",
            "ops",
            Query(rate("worker_events_total", by="event"), "{{event}}"),
            Query(rate("stale_commands_total"), "stale commands"),
        ),
    ]
