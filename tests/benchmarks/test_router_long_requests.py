"""The measurement of long requests at a router, with short ones."""

from __future__ import annotations

import json
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
    out = tmp_path / "stops.json"
    assert router_long_requests.main(["--sizes", "1000,40000", "--processes", "0,1", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    points = {(stop["processes"], stop["path"], stop["characters"]) for stop in results}
    assert len(points) == len(results) == 8
    for stop in results:
        assert stop["status"] == 200
        # A busy machine may hold the loop up once more right after the answer.
        assert 0 < stop["stopped_ms"] <= stop["took_ms"] + 30_000
