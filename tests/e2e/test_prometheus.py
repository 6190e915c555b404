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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from observed_deployment import Observed, until
from prometheus_server import ROOT, Prometheus, expressions, running_prometheus
from troubled_load import TroubledLoad
from troubles import Troubles

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),  # a crowded machine may take long to start a deployment, and to move everything
    pytest.mark.skipif(
        PROGRAM is None and "CI" not in os.environ,
        reason="needs Debian's package prometheus",
    ),
]

SCRAPE_S = 0.5
WINDOW = "15s"
PATIENCE_S = 300.0

STILL = re.compile(
    # A drain, a peer that outlives its lease, a worker that fails again and again, a notification that comes
    # after the word that there are no more, what both ends of a link end at the same time, pages that GPUs
    # map, a way around by TCP: rare, or of GPUs alone, and each shown by tests of its own.
    # Refusals of an idle machine all fall into the histogram's first bucket, whose quantiles are constants.
    # ``tests/helm/test_expressions_move.py`` moves them as well.
    r"Workers: B|Peers past their lease|Circuit|Late, missing, ended: A|Handshakes and peers: [CD]"
    r"|What workers count: B|Time to turn away|AntiphonTransferFallback"
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
Trouble = Callable[[], None]


def numbers(answers: list[Values]) -> list[Values]:
    """Those that are of numbers alone: a ratio has none while nothing happens."""
    return [values for values in answers if values and all(map(math.isfinite, values.values()))]


def moves(answers: list[Values]) -> bool:
    """Whether one and the same series had two values, apart from rounding."""
    seen: dict[str, set[str]] = {}
    for values in answers:
        for series, value in values.items():
            seen.setdefault(series, set()).add(f"{value:.9g}")
    return any(len(of_one) > 1 for of_one in seen.values())


def still_left(found: dict[str, list[Values]]) -> list[str]:
    """Places that have not shown yet what they must."""
    left = (where for where, answers in found.items() if not moves(answers))
    return [where for where in left if not (found[where] and STILL.search(where))]


@dataclass(frozen=True, slots=True)
class Seen:
    """Place -> what its expression gave while a deployment was in trouble; how many were left waiting."""

    answers: dict[str, list[Values]]
    unanswered: int


@pytest.fixture(scope="module")
def seen(observed: Observed, prometheus: Prometheus) -> Seen:
    """A deployment under load; troubles are brought about until everything has moved that should.

    Expressions are evaluated at every scrape, as panels do, so that nothing depends on when they are asked.
    """
    places = expressions(WINDOW)
    found: dict[str, list[Values]] = {where: [] for where in places}
    troubles = Troubles(observed, seen_after_s=4 * SCRAPE_S)
    under_load: list[tuple[re.Pattern[str], Trouble]] = [
        (re.compile(r"under way|Sequences: D"), troubles.hold_writes),
        (re.compile(r"ended: B|lost: B"), lambda: troubles.hold_prompts(7.0)),
        (re.compile(r"Decode workers"), troubles.kill_decode),
        (re.compile(r""), troubles.kill_prefill),
    ]
    alone: list[tuple[re.Pattern[str], Trouble]] = [
        (re.compile(r"Preemptions"), lambda: troubles.crowd(6, 500)),
        (re.compile(r"Clients gone: B"), troubles.stop_reading),
        (re.compile(r"Sequences: E"), troubles.leave_held_prompt),
    ]
    """Places, and what moves them; all that move with the load are left to the last of those under load."""

    def bring_about(troubles: list[tuple[re.Pattern[str], Trouble]], left: list[str]) -> None:
        for of, trouble in troubles:
            if any(map(of.search, left)):
                trouble()

    with TroubledLoad(observed) as load:
        until(lambda: load.answers >= 8, 120)
        asked = began = time.time()
        while (left := still_left(found)) and time.time() - began < PATIENCE_S:
            with load.held_back():
                bring_about(alone, left)
            bring_about(under_load, left)
            time.sleep(4 * SCRAPE_S)
            now = time.time()
            for where in left:
                found[where] += numbers(prometheus.query_range(places[where], asked, now, SCRAPE_S))
            asked = now
    return Seen(found, load.unanswered)


def test_every_expression_gives_numbers(seen: Seen) -> None:
    assert len(seen.answers) > 120
    assert [where for where, answers in seen.answers.items() if not answers] == []


def test_every_expression_moves(seen: Seen) -> None:
    left = still_left(seen.answers)
    assert {where: seen.answers[where][-1:] for where in left} == {}


def test_nobody_is_left_waiting(seen: Seen) -> None:
    assert seen.unanswered == 0


def test_exemplars_are_kept(seen: Seen, prometheus: Prometheus) -> None:
    assert prometheus.exemplars("antiphon_time_to_first_token_seconds_bucket")


def test_every_process_is_found_and_scraped(seen: Seen, prometheus: Prometheus) -> None:
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
