"""The registry of one process: labels that all its samples share, vLLM's names where asked for, its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics

from antiphon import __version__

PREFIX = "antiphon_"
VllmNames = Mapping[str, tuple[str, ...]]
"""Name without prefix of one of our metrics -> names of vLLM's, without ``vllm:``, that mean the same."""


class ProcessRegistry(CollectorRegistry):
    """Adds the process's labels to every sample when it is read, so that no update pays for them.

    Args:
        labels: such as ``model_name``; a sample's own labels win.
        vllm_names: metrics listed there appear a second time under vLLM's names.
    """

    def __init__(self, labels: Mapping[str, str], *, vllm_names: VllmNames | None = None) -> None:
        super().__init__()
        self._labels = dict(labels)
        self._vllm_names = vllm_names or {}

    def collect(self) -> Iterator[Metric]:
        """Every metric, as it is exported."""
        for metric in super().collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                # When a series began is of no use to anyone here, and a series of its own.
                if not sample.name.endswith("_created")
            ]
            yield metric
            for name in self._vllm_names.get(metric.name.removeprefix(PREFIX), ()):
                yield _renamed(metric, f"vllm:{name}")

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of all metrics and its content type; with exemplars for a client that ``accept``s them."""
        if "application/openmetrics-text" in accept:
            # Other ways of escaping turn the colon of vLLM's names into an underscore.
            text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self, escaping="allow-utf-8"
            )
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self), CONTENT_TYPE_LATEST

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Declare a counter."""
        return Counter(PREFIX + name, text, labels, registry=self)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Declare a gauge."""
        return Gauge(PREFIX + name, text, labels, registry=self)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Declare a histogram."""
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self)

    def declare_build(self, role: str) -> None:
        """Export the version of this process."""
        info = Info(f"{PREFIX}build", "Version of this process.", registry=self)
        info.info({"version": __version__, "role": role})


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit if name.endswith(metric.unit) else "")
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return copy
