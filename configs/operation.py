"""Sections of operation: where processes run, how many, and what they say of themselves."""

from __future__ import annotations

from typing import Literal

import pydantic

from antiphon.configs.section import Section


class RayConfig(Section):
    """How the deployment meets its Ray cluster."""

    address: str | None = None
    """Address of a running cluster; absent starts a local one that ends with the deployment."""
    role_resources: bool = False
    """Each process also reserves 1 of its role's custom resource (``antiphon_prefill``, ``antiphon_decode``,
    ``antiphon_router``), so that it runs only on nodes that were started with it; a running cluster only."""
    revision: str = pydantic.Field("", max_length=20, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """Names the present form of the workers; ``antiphon upgrade`` goes from one to the next. With
    ``role_resources`` workers then reserve ``antiphon_prefill_NAME`` and ``antiphon_decode_NAME`` instead, so
    that those of two revisions run on nodes of their own."""
    placement_timeout_s: float = pydantic.Field(60.0, gt=0)
    """The cluster must have room for every process after this long; more where nodes are still coming up."""

    @pydantic.model_validator(mode="after")
    def _resources_are_of_a_running_cluster(self) -> RayConfig:
        if self.role_resources and self.address is None:
            raise ValueError("role_resources needs address: a cluster of the deployment's own has none")
        return self


class AutoscaleConfig(Section):
    """When pools that have ``max_replicas`` change their size."""

    interval_s: float = pydantic.Field(5.0, gt=0)
    """How often the load is looked at."""
    prefill_backlog_s: float = pydantic.Field(2.0, gt=0)
    """More prefill workers when the prompts that wait would take the pool longer than this."""
    decode_page_use: float = pydantic.Field(0.8, gt=0, lt=1)
    """More decode workers when a larger share of their KV pages is held, or requests wait for pages."""
    shrink_after_s: float = pydantic.Field(120.0, ge=0)
    """One worker fewer after the pool was too large for this long."""


class LogConfig(Section):
    """What every process writes to standard error, as JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""


class MetricsConfig(Section):
    """Prometheus metrics. A router has them at /metrics of its API; other processes listen for them alone."""

    host: str = "127.0.0.1"
    """Address that workers and the supervisor listen on."""
    supervisor_port: int = pydantic.Field(0, ge=0, le=65535)
    """Port of the supervisor, which also lists every process at /targets; 0 picks a free one."""
    worker_port: int = pydantic.Field(0, ge=0, le=65535)
    """First port of workers: those of one node take it and the ones after it; 0 picks free ones."""
    compat: Literal["vllm"] | None = None
    """``vllm``: figures that vLLM also has appear a second time under its names, for existing dashboards."""


class TracingConfig(Section):
    """OpenTelemetry spans of requests."""

    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, such as ``http://collector:4318``; absent records nothing."""
    sample_ratio: float = pydantic.Field(0.1, ge=0, le=1)
    """Share of requests that are recorded, of those whose ``traceparent`` does not decide it."""
