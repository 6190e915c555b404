"""A real Prometheus scrapes the real metrics of one process of each role, and every expression moves.

The metrics are those that the code declares, each with every label, moved by the test instead of by load, so
that what is rare in life moves as well; ``tests/e2e/test_prometheus.py`` scrapes a deployment under load.
"""

from __future__ import annotations

import http.server
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import psutil
import pytest
import yaml
from moving_metrics import MovingProcesses
from rendered_chart import CHART, ROOT

PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None and "CI" not in os.environ, reason="needs prometheus, of Debian's package of that name"
)

SCRAPE_S = 0.5
WINDOW = "6s"


def dcgm(turns: int, chance: random.Random) -> str:
    """What dcgm-exporter would say of one GPU."""
    text = (ROOT / "helm/monitoring/gpu_panels.py").read_text()
    names = set(re.findall(r"DCGM_FI_\w+", text))
    labels = 'gpu="0", Hostname="node"'
    return "".join(
        f"{name}{{{labels}}} {turns**2 if name.endswith('_BYTES') else chance.random() * 100}\n"
        for name in sorted(names)
    )


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A page of metrics that moves with every scrape; yields its host and port."""
    chance, turns = random.Random(0), itertools.count()
    moving, lock = MovingProcesses(chance), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            process = self.path.strip("/")
            with lock:
                text = dcgm(next(turns), chance) if process == "dcgm" else moving.page(process)
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped for a while; yields its URL."""
    assert PROMETHEUS is not None, "prometheus is not installed"
    folder = tmp_path_factory.mktemp("prometheus")
    jobs = [
        {"job_name": process, "metrics_path": f"/{process}", "static_configs": [{"targets": [target]}]}
        for process in ("router", "prefill", "decode", "supervisor", "dcgm")
    ]
    every = f"{SCRAPE_S * 1000:.0f}ms"
    settings = {"scrape_interval": every, "scrape_timeout": every}
    rules = [str(ROOT / "docker/prometheus/alerts.yaml")]
    document = {"global": settings, "scrape_configs": jobs, "rule_files": rules}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [
            *(
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
            ),
            *("--web.listen-address=127.0.0.1:0", "--log.level=error"),
        ],
        env={**os.environ, "GOMAXPROCS": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while (port := listening_port(process)) is None:
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        while len(query(url, "count_over_time(antiphon_ready_pairs[2m]) >= 16")) == 0:
            assert time.monotonic() < deadline, "it scrapes too little"
            assert process.poll() is None
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def listening_port(process: subprocess.Popen[bytes]) -> int | None:
    """Where a process listens that was told to take any port; None as long as it does not."""
    assert process.poll() is None, f"it ended with {process.returncode}"
    connections = psutil.Process(process.pid).net_connections("tcp")
    return next((c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN), None)


def query(url: str, expression: str) -> dict[str, float]:
    """Series -> value, as of now; nothing while it does not answer yet."""
    parameters = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}", timeout=60) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is still starting
            return {}
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return {}
    return {json.dumps(s["metric"], sort_keys=True): float(s["value"][1]) for s in found["data"]["result"]}


def compared(expression: promql_parser.Expr) -> Iterator[str]:
    """What an alert compares with its limits: the sides that have values whether or not it fires."""
    if isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in ("and", "or"):
        yield from compared(expression.lhs)
        yield from compared(expression.rhs)
    elif isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in (">", "<", "=="):
        yield str(expression.lhs)
    else:
        yield str(expression)


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and every comparison of an alert."""
    for path in sorted((CHART / "files/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", WINDOW).replace("$model", ".+")
                yield f"{path.stem}: {panel['title']}: {target['refId']}", text
    for group in yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            if rule["alert"] != "AntiphonMetricsMissing":  # which has a value only while there are none
                for place, text in enumerate(compared(promql_parser.parse(rule["expr"]))):
                    yield f"{rule['alert']}: {place}", text


def test_every_expression_is_a_number_that_moves(prometheus: str) -> None:
    cases = dict(expressions())
    assert len(cases) > 120
    seen: dict[str, list[dict[str, float]]] = {where: [] for where in cases}
    deadline = time.monotonic() + 120  # a crowded machine scrapes less often than it is told to
    while time.monotonic() < deadline and (left := [where for where in cases if len(seen[where]) < 2]):
        for where in left:
            values = query(prometheus, cases[where])
            assert all(map(math.isfinite, values.values())), (where, values)
            if values and values not in seen[where]:
                seen[where].append(values)
        time.sleep(0.5)
    assert "; ".join(where for where, values in seen.items() if not values) == ""
    assert "; ".join(where for where, values in seen.items() if len(values) < 2) == ""


def test_the_rules_are_loaded(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=60) as answer:
        groups = json.loads(answer.read())["data"]["groups"]
    assert {group["name"] for group in groups} == {
        "antiphon-objectives",
        "antiphon-health",
        "antiphon-processes",
        "antiphon-repairs",
    }
    assert Path(groups[0]["file"]).name == "alerts.yaml"
