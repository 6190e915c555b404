"""The measurement of long requests at a router, with short ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import structlog

from antiphon.benchmarks import router_long_requests


@pytest.fixture(autouse=True)
def logs_as_before():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_every_size_is_measured_with_and_without_processes(tmp_path: Path) -> None:
    out, began = tmp_path / "stops.json", time.monotonic()
    assert router_long_requests.main(["--sizes", "1000,40000", "--processes", "0,1", "--out", str(out)]) == 0
    whole_ms = 1e3 * (time.monotonic() - began)
    results = json.loads(out.read_text())["results"]
    points = {(stop["processes"], stop["path"], stop["characters"]) for stop in results}
    assert len(points) == len(results) == 8
    for stop in results:
        assert stop["status"] == 200
        assert 0 < stop["took_ms"] < whole_ms
        # A busy machine may hold the loop up once more right after the answer.
        assert 0 < stop["stopped_ms"] < whole_ms
