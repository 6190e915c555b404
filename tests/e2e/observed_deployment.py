"""A deployment of the command line whose logs, metrics and spans a test can read; SIGTERM ends it."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from actor_processes import pid_of_one
from left_behind import assert_nothing_left, environment_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

READY_S = 300.0


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """What a collector was told of one span."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    failed: bool
    start_s: float
    end_s: float
    attributes: dict[str, object]


class SpanReceiver:
    """An OTLP/HTTP receiver on loopback."""

    def __init__(self) -> None:
        self._spans: list[RecordedSpan] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_process in request.resource_spans:
            about = {a.key: a.value.string_value for a in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    values = {a.key: a.value for a in span.attributes}
                    attributes = {key: getattr(v, v.WhichOneof("value")) for key, v in values.items()}
                    self._spans.append(
                        RecordedSpan(
                            about["service.instance.id"],
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.status.code == 2,
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            attributes,
                        )
                    )

    def of(self, trace_id: str) -> list[RecordedSpan]:
        return [span for span in list(self._spans) if span.trace_id == trace_id]


@dataclass
class Observed:
    """A running deployment."""

    process: subprocess.Popen[str]
    url: str
    metrics_url: str
    log_file: Path
    spans: SpanReceiver
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=240.0, trust_env=False)

    def logs(self) -> list[dict[str, object]]:
        """Every line of JSON that any process wrote; the last one may be half-written yet."""
        lines = (re.search(r"\{.*\}$", line) for line in self.log_file.read_text().split("\n")[:-1])
        return [json.loads(found[0]) for found in lines if found]

    def chat(
        self, text: str = "Hello!", headers: dict[str, str] | None = None, **more: object
    ) -> httpx.Response:
        body = {"model": "gpt-oss-tiny", "messages": [{"role": "user", "content": text}], "temperature": 0}
        return self.http.post(
            "/v1/chat/completions", json={"max_completion_tokens": 8, **body, **more}, headers=headers
        )

    def pid_of(self, actor: str) -> int:
        """The process of an actor of which there is one."""
        return pid_of_one(actor, lambda: psutil.Process(self.process.pid).children(recursive=True))

    def pages(self) -> dict[str, str]:
        """Process -> URL of its metrics, the supervisor's included."""
        found = {"supervisor": f"{self.metrics_url}/metrics"}
        for group in self.http.get(f"{self.metrics_url}/targets").json():
            found[group["labels"]["process"]] = f"http://{group['targets'][0]}/metrics"
        return found


def until(
    condition: Callable[[], object], seconds: float = 60.0, seen: Callable[[], object] = lambda: ""
) -> None:
    """Wait for another process to bring something about; ``seen`` is told when it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about in time: {seen()}"
        time.sleep(0.05)


@contextmanager
def observed_deployment(
    config_file: Path, log_file: Path, spans: SpanReceiver, home: Path
) -> Iterator[Observed]:
    """Run ``antiphon serve`` until the block ends: SIGTERM must end it with status 0, and leave nothing."""
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "antiphon.cluster.cli", "serve", "--config", str(config_file)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment_of(home),
        )
    try:
        assert process.stdout is not None
        timer = threading.Timer(READY_S, process.kill)
        timer.start()
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"top (http://\S+)", line):
                break
        timer.cancel()
        assert found, f"it ended before it was ready: {log_file.read_text()[-2000:]}"
        url = re.search(r"at (http://\S+)/v1", said)
        assert url is not None
        observed = Observed(process, url[1], found[1], log_file, spans)
        with observed.http:
            yield observed
        me = psutil.Process(process.pid)
        family = [me, *me.children(recursive=True)]
        process.terminate()
        process.communicate(timeout=180)
        assert process.returncode == 0
        assert_nothing_left(family, set(), home)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
