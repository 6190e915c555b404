"""The dashboards drawn from a Prometheus' answers."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendered_chart import ROOT

SCRIPT = ROOT / "helm/monitoring/pictures.py"


@pytest.fixture
def answering() -> Iterator[tuple[str, list[str]]]:
    """Something that answers every question with a curve, or with buckets, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            (expression,), (start,) = query["query"], query["start"]
            asked.append(expression)
            labels = (
                [{"le": le} for le in ("0.1", "1", "+Inf")] if "by (le)" in expression else [{"worker": "w"}]
            )
            values = [[float(start) + i, "NaN" if i == 3 else str(i)] for i in range(10)]
            result = [{"metric": label, "values": values} for label in labels]
            body = json.dumps({"data": {"result": result}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_each_kind_of_panel_is_drawn(answering: tuple[str, list[str]], tmp_path: Path) -> None:
    url, asked = answering
    boards = {"overview", "latency-anatomy"}  # numbers and curves; stacked curves and heat maps
    named = [argument for board in sorted(boards) for argument in ("--board", board)]
    command = [sys.executable, str(SCRIPT), url, "--folder", str(tmp_path), "--window", "7s", *named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.png")} == boards
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert not any("$" in expression for expression in asked)


def test_the_pictures_in_the_docs_are_of_dashboards_that_exist() -> None:
    dashboards = {path.stem for path in (ROOT / "helm/antiphon/files/dashboards").glob("*.json")}
    pictures = {path.stem for path in (ROOT / "docs/dashboards").glob("*.png")}
    assert pictures == dashboards - {"gpu"}
    page = (ROOT / "docs/operations/observability.md").read_text()
    assert all(f"(../dashboards/{name}.png)" in page for name in pictures)
