"""What the supervisor exports: the members of the deployment as it sees them, and where the others are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from antiphon.cluster.member import Member, MemberState
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role, Topology
from antiphon.telemetry.metrics_server import MetricsServer
from antiphon.telemetry.registry import PREFIX, ProcessRegistry

LABELS = ("role", "worker")


class SupervisorMetrics:
    """Exports ``members`` and ``topology``, which the scraper's thread reads as they are at that moment."""

    def __init__(
        self,
        model_name: str,
        members: Callable[[], Sequence[Member]],
        topology: Callable[[], Topology],
    ) -> None:
        self.registry = ProcessRegistry({"model_name": model_name})
        self._members = members
        self._topology = topology
        self.registry.register(self)
        self.registry.declare_build("supervisor")

    def describe(self) -> list[Metric]:
        """Nothing is known before a deployment starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        members = self._members()
        yield self._counted(members)
        up = self._gauge("member_up", "1 while a process runs.")
        ready = self._gauge("member_ready", "1 while a process can do its part of a request.")
        requests = self._gauge("member_requests", "Requests that a process holds, when it was last asked.")
        pages = self._gauge("member_pages_held", "KV pages that requests of a process hold.")
        restarts = CounterMetricFamily(
            f"{PREFIX}member_restarts", "Lives of a process after its first.", labels=LABELS
        )
        for member in members:
            labels = (member.spec.role.value, member.spec.worker_id)
            status = member.status
            up.add_metric(labels, float(member.up))
            ready.add_metric(labels, float(status is not None and status.ready))
            requests.add_metric(labels, status.requests if status is not None else 0)
            pages.add_metric(labels, status.pages_held if status is not None else 0)
            restarts.add_metric(labels, member.restarts)
        yield from (up, ready, requests, pages, restarts)
        yield GaugeMetricFamily(
            f"{PREFIX}topology_version",
            "Version of the list of living processes; it rises whenever one comes or goes.",
            value=self._topology().version,
        )

    def targets(self) -> list[tuple[str, dict[str, str]]]:
        """(host:port, labels) of every process but the supervisor, for Prometheus' HTTP discovery."""
        found = []
        for member in self._members():
            address = member.address
            if address is not None and address.metrics_url:
                url = urlsplit(address.metrics_url)
                # Not `worker` or `role`: those are labels of the metrics themselves.
                found.append((url.netloc, {"process": address.worker_id, "__scheme__": url.scheme}))
        return found

    @staticmethod
    def _gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, labels=LABELS)

    @staticmethod
    def _counted(members: Sequence[Member]) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}members", "Processes by role and by where they stand.", labels=("role", "state")
        )
        counted = Counter((member.spec.role, member.state) for member in members)
        for role in Role:
            for state in MemberState:
                family.add_metric((role.value, state.value), counted[role, state])
        return family


@contextlib.contextmanager
def supervisor_pages(config: DeploymentConfig, metrics: SupervisorMetrics) -> Iterator[str]:
    """Serve /metrics and /targets of the supervisor; yields the base URL.

    Raises:
        ConfigError: nothing can listen at ``metrics.host`` and ``metrics.supervisor_port``.
    """
    host = config.metrics.host
    server = MetricsServer(metrics.registry, host, config.metrics.supervisor_port, targets=metrics.targets)
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    finally:
        server.close()
