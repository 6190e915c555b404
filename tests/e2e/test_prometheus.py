"""A real Prometheus scrapes a deployment under load, with troubles, and is asked all that dashboards ask."""

from __future__ import annotations

import http.server
import math
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
from observed_deployment import Observed, until
from prometheus_server import ROOT, Prometheus, expressions, running_prometheus
from troubled_load import TroubledLoad

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # a crowded machine may take long to start a deployment, and to move everything
    pytest.mark.skipif(
        PROGRAM is None and "CI" not in os.environ,
        reason="needs Debian's package prometheus",
    ),
]

SCRAPE_S = 1.0
WINDOW = "15s"
PATIENCE_S = 150.0
KILL_EVERY_S = 40.0

CALM = re.compile(
    # What only a client that never reads, a stuck peer, a drain or an exhausted cache would move.
    r"Clients gone: B|Peers past their lease|Late, missing, ended: [AB]|was lost: B|Workers: B|Preemptions"
    # What stands still for as long as no process comes or goes between two questions.
    r"|AntiphonTransferFallback|AntiphonPoolDown|AntiphonRestarting|AntiphonWorkerDown|AntiphonNoReadyPair|Circuit|workers"
    r"|overview: Ready pairs|overview: Processes|Ready pairs at each router|Up and ready|Workers: A"
    r"|Handshakes and peers: B|Restarts|wanted: B|Prefill workers"
)
"""Places whose value may be the same throughout; it must be a number all the same."""


@pytest.fixture(scope="module")
def dcgm() -> Iterator[str]:
    """What dcgm-exporter would say of one GPU; yields its host and port."""
    chance = random.Random(0)
    names = sorted(set(re.findall(r"DCGM_FI_\w+", (ROOT / "helm/monitoring/gpu_panels.py").read_text())))
    began = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            for name in names:
                value = (time.monotonic() - began) ** 2 if name.endswith("_BYTES") else chance.random() * 100
                self.wfile.write(f'{name}{{gpu="0", Hostname="node"}} {value}\n'.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(
    observed: Observed, dcgm: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """It finds every process through the supervisor's list, as in docs/operations/observability.md."""
    assert PROGRAM is not None, "prometheus is not installed"
    supervisor = observed.metrics_url.removeprefix("http://")
    discovered = {"url": f"{observed.metrics_url}/targets", "refresh_interval": "1s"}
    jobs: list[dict[str, object]] = [
        {"job_name": "antiphon", "http_sd_configs": [discovered]},
        {"job_name": "antiphon-supervisor", "static_configs": [{"targets": [supervisor]}]},
        {"job_name": "dcgm", "static_configs": [{"targets": [dcgm]}]},
    ]
    with running_prometheus(PROGRAM, tmp_path_factory.mktemp("prometheus"), jobs, SCRAPE_S) as running:
        yield running


Values = dict[str, float]


def numbers(values: Values) -> bool:
    """Whether an answer is there, and of numbers: a ratio has none while nothing happens."""
    return bool(values) and all(map(math.isfinite, values.values()))


@pytest.fixture(scope="module")
def seen(observed: Observed, prometheus: Prometheus) -> dict[str, list[Values]]:
    """Place -> the different numbers that its expression gave while a deployment under load loses workers.

    Each is asked until it has given two answers of numbers that differ, one where it may stand still.
    """
    places = expressions(WINDOW)
    found: dict[str, list[Values]] = {where: [] for where in places}
    with TroubledLoad(observed) as load:
        until(lambda: load.answers >= 8, 120)
        began, kill_at = time.monotonic(), time.monotonic() + 2 * SCRAPE_S
        while time.monotonic() - began < PATIENCE_S:
            if time.monotonic() > kill_at:
                load.kill_busy("PrefillActor", "prefill-0")
                kill_at = time.monotonic() + KILL_EVERY_S
            left = [where for where, got in found.items() if len(got) < (1 if CALM.search(where) else 2)]
            if not left:
                break
            for where in left:
                values = prometheus.query(places[where])
                if numbers(values) and values not in found[where]:
                    found[where].append(values)
            time.sleep(SCRAPE_S)
    return found


def test_every_expression_gives_numbers(seen: dict[str, list[Values]]) -> None:
    assert len(seen) > 120
    assert "; ".join(where for where, values in seen.items() if not values) == ""


def test_every_expression_moves(seen: dict[str, list[Values]]) -> None:
    still = [where for where, values in seen.items() if len(values) < 2]
    assert "; ".join(where for where in still if not CALM.search(where)) == ""


def test_exemplars_are_kept(seen: dict[str, list[Values]], prometheus: Prometheus) -> None:
    assert prometheus.exemplars("antiphon_time_to_first_token_seconds_bucket")


def test_every_process_is_found_and_scraped(seen: dict[str, list[Values]], prometheus: Prometheus) -> None:
    # The load ends while a killed worker may still be starting, so each is given the time to come back.
    def scraped() -> set[str]:
        up = prometheus.query('up{job=~"antiphon.*"} == 1')
        processes = {re.search(r'"process": "([\w-]+)"', series) for series in up}
        return {found[1] for found in processes if found}

    until(lambda: scraped() == {"prefill-0", "decode-0", "router-0"}, 120)
    assert prometheus.query("count(antiphon_topology_version)")
    # The names that vLLM's dashboards ask for, once over all processes.
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_count"):
        assert prometheus.query(f'sum(vllm:{name}{{model_name="gpt-oss-tiny"}})'), name
