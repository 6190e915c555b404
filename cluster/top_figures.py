"""What ``antiphon top`` shows: figures between two readings of every process's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one process at one time. ``at`` is a reading of ``time.monotonic``."""

    at: float
    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    @classmethod
    def parse(cls, at: float, text: str) -> Reading:
        """From Prometheus' text format; names lose the prefix ``antiphon_``."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("antiphon_")
                samples.setdefault(name, []).append((sample.labels, sample.value))
        return cls(at, {name: tuple(values) for name, values in samples.items()})

    def matching(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of a metric that have these labels."""
        for own, value in self.samples.get(name, ()):
            if labels.items() <= own.items():
                yield own, value

    def total(self, name: str, **labels: str) -> float:
        """Sum of those samples; 0 when there are none."""
        return sum(value for _, value in self.matching(name, **labels))


@dataclass(frozen=True, slots=True)
class Interval:
    """Two readings of one process, one after the other."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        """How far they are apart."""
        return max(self.after.at - self.before.at, 1e-9)

    def now(self, name: str, **labels: str) -> float:
        """A gauge, added up."""
        return self.after.total(name, **labels)

    def grown(self, name: str, **labels: str) -> float:
        """What a counter gained; a process that was restarted in between begins at 0."""
        before, after = self.before.total(name, **labels), self.after.total(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """What a counter gained per second."""
        return self.grown(name, **labels) / self.seconds


def quantile(share: float, intervals: Iterable[Interval], name: str, **labels: str) -> float | None:
    """The upper bound of the bucket in which a quantile of a histogram's new observations lies.

    Over all of the processes; None without an observation, infinity beyond the last bound.
    """
    grown: dict[float, float] = {}
    for interval in intervals:
        for own, _ in interval.after.matching(f"{name}_bucket", **labels):
            bound = own["le"]
            grown[float(bound)] = grown.get(float(bound), 0.0) + interval.grown(
                f"{name}_bucket", **{**labels, "le": bound}
            )
    whole = grown.get(math.inf, 0.0)
    if not whole:
        return None
    return next(bound for bound in sorted(grown) if grown[bound] >= share * whole)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One worker."""

    worker: str
    role: str
    state: str
    """``ready``, ``up``, ``down``, or ``draining``."""
    running: int
    waiting: int
    pages_share: float
    """Share of the KV pages of full-attention layers in use."""
    quarantined: int
    tokens_per_s: float
    """Prompt tokens computed by a prefill worker, tokens sampled by a decode worker."""
    mean_batch: float | None
    """Sequences per step that sampled."""
    restarts: int


def pool_rows(supervisor: Reading, workers: Mapping[str, Interval]) -> list[PoolRow]:
    """A row per worker that the supervisor knows; one that was not read shows no figures."""
    rows = []
    for labels, up in supervisor.matching("member_up"):
        name, role = labels["worker"], labels["role"]
        if role == "router":
            continue
        own = workers.get(name)
        sampled = "generation_tokens_total" if role == "decode" else "prompt_tokens_by_source_total"
        source = {} if role == "decode" else {"source": "local_compute"}
        ready = supervisor.total("member_ready", worker=name) > 0
        state = "down" if not up or own is None else "ready" if ready else "up"
        if own is not None and own.now("worker_draining"):
            state = "draining"
        steps = own.grown("batch_size_count") if own is not None else 0.0
        rows.append(
            PoolRow(
                name,
                role,
                state,
                int(own.now("num_requests_running")) if own is not None else 0,
                int(own.now("num_requests_waiting") + own.now("num_requests_awaiting_kv")) if own else 0,
                own.now("kv_cache_usage_perc") if own is not None else 0.0,
                int(own.now("kv_blocks", state="quarantined")) if own is not None else 0,
                own.rate(sampled, **source) if own is not None else 0.0,
                own.grown("batch_size_sum") / steps if own is not None and steps else None,
                int(supervisor.total("member_restarts_total", worker=name)),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Service:
    """What clients meet, over all routers."""

    in_flight: int
    queued: int
    requests_per_s: float
    errors_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    retries: int
    """Attempts that were started over, since the routers began."""


def service(routers: list[Interval]) -> Service:
    """From the metrics of the routers."""
    ttft, itl = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return Service(
        int(sum(r.now("requests_in_flight") for r in routers)),
        int(sum(r.now("requests_queued") for r in routers)),
        sum(r.rate("e2e_request_latency_seconds_count") for r in routers),
        sum(r.rate("request_errors_total") for r in routers),
        sum(r.rate("output_tokens_total") for r in routers),
        quantile(0.5, routers, ttft),
        quantile(0.9, routers, ttft),
        quantile(0.5, routers, itl),
        quantile(0.9, routers, itl),
        int(sum(r.now("retries_total") for r in routers)),
    )


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV on its way, over all prefill workers."""

    in_flight: int
    bytes_per_s: float
    writes_per_s: float
    write_p90_s: float | None
    tail_p90_s: float | None
    failures: int
    """Since the workers began."""


def transfers(workers: list[Interval]) -> Transfers:
    """From the metrics of the workers."""
    return Transfers(
        int(sum(w.now("kv_transfers_in_flight") for w in workers)),
        sum(w.rate("kv_transfer_bytes_sum") for w in workers),
        sum(w.rate("kv_transfer_seconds_count") for w in workers),
        quantile(0.9, workers, "kv_transfer_seconds"),
        quantile(0.9, workers, "request_transfer_tail_seconds"),
        int(sum(w.now("kv_transfer_failures_total") for w in workers)),
    )
