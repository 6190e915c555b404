"""A real Prometheus on loopback, and the questions of dashboards and alerts that it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import promql_parser
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "docker/prometheus/alerts.yaml"
DASHBOARDS = ROOT / "helm/antiphon/files/dashboards"


class Prometheus:
    """Asks a server that runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=20.0, trust_env=False)

    def query(self, expression: str) -> dict[str, float]:
        """Series -> value, as of now."""
        answer = self._http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        found = answer.json()["data"]["result"]
        return {json.dumps(s["metric"], sort_keys=True): float(s["value"][1]) for s in found}

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[dict[str, float]]:
        """What the expression gave at each step: series -> value, as in a panel."""
        asked = {"query": expression, "start": start, "end": end, "step": step_s}
        answer = self._http.post("/api/v1/query_range", data=asked)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        steps: dict[float, dict[str, float]] = {}
        for series in answer.json()["data"]["result"]:
            name = json.dumps(series["metric"], sort_keys=True)
            for at, value in series["values"]:
                steps.setdefault(float(at), {})[name] = float(value)
        return [steps[at] for at in sorted(steps)]

    def exemplars(self, metric: str) -> set[str]:
        """Trace ids that observations of a metric lead to."""
        now = time.time()
        answer = self._http.get(
            "/api/v1/query_exemplars", params={"query": metric, "start": now - 600, "end": now + 1}
        ).json()
        return {e["labels"]["trace_id"] for series in answer["data"] for e in series["exemplars"]}

    def ready(self) -> bool:
        """It answers."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Hang up."""
        self._http.close()


def port_of(process: subprocess.Popen[bytes]) -> int:
    """Where a process listens that was told to take any port."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, f"it ended with {process.returncode}"
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.05)


@contextmanager
def running_prometheus(
    program: str, folder: Path, jobs: list[dict[str, object]], scrape_s: float
) -> Iterator[Prometheus]:
    """Run one until the block ends."""
    interval = f"{scrape_s * 1000:.0f}ms"
    settings = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "2s"}
    document = {"global": settings, "scrape_configs": jobs, "rule_files": [str(RULES)]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--enable-feature=exemplar-storage",
            "--log.level=error",
        ],
        env={**os.environ, "GOMAXPROCS": "1"},
    )
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port_of(process)}")
        try:
            deadline = time.monotonic() + 120
            while not prometheus.ready():
                assert process.poll() is None
                assert time.monotonic() < deadline, "it listens and is not ready"
                time.sleep(0.1)
            yield prometheus
        finally:
            prometheus.close()
    finally:
        process.terminate()
        process.wait(timeout=30)


def expressions(window: str) -> dict[str, str]:
    """Where -> expression, of every panel and of every comparison of an alert."""
    found = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", window).replace("$model", ".+")
                found[f"{path.stem}: {panel['title']}: {target['refId']}"] = text
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if rule["alert"] != "AntiphonMetricsMissing":  # which has a value only while there are none
                for place, text in enumerate(compared(promql_parser.parse(rule["expr"]))):
                    found[f"{rule['alert']}: {place}"] = text
    return found


def compared(expression: promql_parser.Expr) -> Iterator[str]:
    """What an alert compares with its limits: the sides that have values whether or not it fires."""
    if isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in ("and", "or"):
        yield from compared(expression.lhs)
        yield from compared(expression.rhs)
    elif isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in (">", "<", "=="):
        yield str(expression.lhs)
    else:
        yield str(expression)
