"""Registries of processes and the pages that they are read from."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from antiphon.protocol.errors import ConfigError
from antiphon.telemetry.loop_metrics import LoopHistogram, LoopHistograms
from antiphon.telemetry.metrics_server import MetricsServer
from antiphon.telemetry.registry import ProcessRegistry

Serve = Callable[..., MetricsServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MetricsServer] = []

    def start(registry: ProcessRegistry, port: int = 0, **more: object) -> MetricsServer:
        servers.append(MetricsServer(registry, "127.0.0.1", port, **more))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def get(server: MetricsServer, path: str, accept: str = "*/*") -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers["content-type"]


def registry() -> ProcessRegistry:
    made = ProcessRegistry(
        {"model_name": "m", "role": "decode"}, vllm_names={"latency_seconds": ("latency_seconds",)}
    )
    made.counter("things", "Things.", "role").labels("own").inc(2)
    made.histogram("latency_seconds", "Latency.", (1.0, 2.0)).observe(1.5, {"trace_id": "ab"})
    LoopHistogram("antiphon_steps", "Steps.", (1, 2), made).observe(1)
    return made


def test_samples_have_the_labels_of_the_process_and_vllms_names(serve: Serve) -> None:
    text, kind = get(serve(registry()), "/metrics")
    assert kind.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (things,) = families["antiphon_things"].samples
    assert (things.labels, things.value) == ({"model_name": "m", "role": "own"}, 2.0)
    twins = [families[f"{prefix}latency_seconds"].samples for prefix in ("antiphon_", "vllm:")]
    own, theirs = ([(s.labels, s.value) for s in samples] for samples in twins)
    assert own == theirs
    assert "_created" not in text


def test_histograms_of_one_label_are_counted_apart() -> None:
    made = ProcessRegistry({"model_name": "m"}, vllm_names={"writes": ("nixl_writes",)})
    histograms = LoopHistograms("antiphon_writes", "Writes.", (1, 2), "rank", made)
    for rank, value in (("0", 1), ("0", 5), ("1", 2)):
        histograms.of(rank).observe(value)
    families = {f.name: f for f in text_string_to_metric_families(made.exposition()[0].decode())}
    for name in ("antiphon_writes", "vllm:nixl_writes"):
        found = {(s.name.removeprefix(name), s.labels["rank"], s.labels.get("le")): s.value
                 for s in families[name].samples}  # fmt: skip
        assert {key: value for key, value in found.items() if key[1] == "0"} == {
            ("_bucket", "0", "1.0"): 1, ("_bucket", "0", "2.0"): 1, ("_bucket", "0", "+Inf"): 2,
            ("_sum", "0", None): 6, ("_count", "0", None): 2,
        }  # fmt: skip
        assert {key: value for key, value in found.items() if key[1] == "1"} == {
            ("_bucket", "1", "1.0"): 0, ("_bucket", "1", "2.0"): 1, ("_bucket", "1", "+Inf"): 1,
            ("_sum", "1", None): 2, ("_count", "1", None): 1,
        }  # fmt: skip


def test_openmetrics_has_exemplars_and_keeps_every_name(serve: Serve) -> None:
    text, kind = get(serve(registry()), "/metrics", "application/openmetrics-text; version=1.0.0,*/*;q=0.1")
    assert kind.startswith("application/openmetrics-text")
    samples = [sample for family in parse_openmetrics(text) for sample in family.samples]
    names = {sample.name for sample in samples}
    assert {"antiphon_latency_seconds_bucket", "vllm:latency_seconds_bucket", "antiphon_steps_sum"} <= names
    assert {s.exemplar.labels["trace_id"] for s in samples if s.exemplar} == {"ab"}


def test_workers_of_one_node_share_a_first_port(serve: Serve) -> None:
    with socket.socket() as holder:
        # Bound like this and not listening, it keeps the port from others and leaves it to the server.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        first = holder.getsockname()[1]
        ports = [serve(registry(), first, several=True).port for _ in range(3)]
        assert ports[0] == first
        assert ports == sorted(set(ports))
        with pytest.raises(ConfigError, match=str(first)):
            serve(registry(), first)


def test_targets_and_unknown_pages(serve: Serve) -> None:
    server = serve(registry(), targets=lambda: [("10.0.0.7:9465", {"process": "decode-0"})])
    assert json.loads(get(server, "/targets")[0]) == [
        {"targets": ["10.0.0.7:9465"], "labels": {"process": "decode-0"}}
    ]
    assert json.loads(get(server, "/health?x=1")[0]) == {"status": "ok"}
    for path in ("/", "/targets/x"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server, path)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(serve(registry()), "/targets")


def test_a_page_that_cannot_be_made_is_an_error_and_the_next_one_works(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        broken = True

        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> Iterator[Metric]:
            if self.broken:
                raise RuntimeError("the worker is gone")
            return iter(())

    collector, own = Broken(), registry()
    own.register(collector)
    server = serve(own)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        get(server, "/metrics")
    assert "the worker is gone" in caplog.text
    collector.broken = False
    assert "antiphon_things_total" in get(server, "/metrics")[0]
