"""What a worker says about itself to its supervisor, as metrics; asked for when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from antiphon.protocol.status import WorkerStatus
from antiphon.telemetry.registry import PREFIX

FAILURES = {
    "failures_handshake": ("handshake", "failed"),
    "failures_reserve": ("reserve", "refused"),
    "failures_post": ("post", "failed"),
    "failures_transfer": ("transfer", "failed"),
    "failures_connection": ("transfer", "connection"),
    "failures_notify": ("notify", "failed"),
    "receives_timed_out": ("transfer", "timeout"),
    "receives_stuck": ("transfer", "writer_stuck"),
    "checksum_mismatches": ("transfer", "checksum"),
    "handshakes_failed": ("handshake", "refused"),
}
"""Counter of a worker -> stage and reason of a failed transfer."""

VLLM_NAMES = {
    "kv_transfer_failures": ("nixl_num_failed_transfers",),
    "kv_lease_expired": ("nixl_num_kv_expired_reqs",),
    "kv_late_notifications": ("nixl_num_notifications_after_expiry",),
}
"""What of vLLM's metrics has a counterpart here."""

_COUNTERS = {
    "kv_lease_expired": ("Rights to write that ended because their writer died.", ("leases_ended_by_death",)),
    "kv_late_notifications": ("Notifications of writes that nobody waited for.", ("notifications_late",)),
    "kv_missing_writes": ("Writes that a decode worker asked for again.", ("missing_writes_asked",)),
    "kv_sent_bytes": ("Bytes of KV that have arrived at decode workers.", ("bytes_sent",)),
    "kv_received_requests": ("Attempts whose KV has arrived as a whole.", ("receives_complete",)),
    "kv_lost_requests": ("Attempts whose KV never came and was computed again.", ("receives_lost",)),
}
"""Metric -> what it is, and the counters of a worker that it adds up."""


class WorkerStatusCollector:
    """Exports ``status()`` of one worker, which must be safe from any thread."""

    def __init__(self, status: Callable[[], WorkerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing: a worker can be asked once it has started, and that is after this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        now = self._status()
        gauges = {
            "worker_ready": ("1 once a KV peer has shaken hands and its probe arrived.", float(now.ready)),
            "worker_draining": ("1 while nothing new is taken.", float(now.draining)),
            "worker_requests": ("Requests held in any state.", now.requests),
            "kv_peers": ("Workers that have passed the handshake and the probe.", len(now.kv_peers)),
            "kv_peers_over_tcp": (
                "KV peers whose KV moves over TCP: right without RDMA, a fallback with it.",
                sum(path == "tcp" for path, _ in now.kv_paths.values()),
            ),
            "kv_peers_mapped": (
                "KV peers of one host whose GPUs write straight into the pages here.",
                sum(path == "mapped" for path, _ in now.kv_paths.values()),
            ),
            "kv_slowest_path_bytes_per_second": (
                "Rate of the slowest KV peer in the self-test of its handshake; 0 without a peer.",
                min((rate for _, rate in now.kv_paths.values()), default=0.0),
            ),
            "kv_pages_held": ("Pages that requests hold, quarantined ones included.", now.pages_held),
            "kv_overdue_writers": ("Peers past their lease which may still write.", len(now.overdue_writers)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, (text, counters) in _COUNTERS.items():
            total = sum(now.counters.get(counter, 0) for counter in counters)
            yield CounterMetricFamily(PREFIX + name, text, value=total)
        yield _labelled(
            "kv_handshakes",
            "Handshakes with KV peers, by how they ended.",
            ("result",),
            {(kind,): now.counters.get(f"handshakes_{kind}", 0) for kind in ("ok", "failed")},
        )
        yield _labelled(
            "kv_transfer_failures",
            "Failed transfers.",
            ("stage", "reason"),
            {where: now.counters.get(counter, 0) for counter, where in FAILURES.items()},
        )
        yield _labelled(
            "worker_events",
            "Everything that a worker counts, by name: stale messages, repeats, resends, ends.",
            ("event",),
            {(name,): value for name, value in now.counters.items()},
        )


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for where, value in values.items():
        family.add_metric(where, value)
    return family
