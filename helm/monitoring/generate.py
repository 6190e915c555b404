"""Write the dashboards and alert rules of the chart, or with ``--check`` say which are out of date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import alerts
import dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder

CHART_FILES = Path(__file__).resolve().parents[1] / "antiphon/files"
COMPOSE = Path(__file__).resolve().parents[2] / "docker/prometheus"


def documents() -> Iterator[tuple[Path, str]]:
    """(file, text) of everything that is generated."""
    for name in dashboards.DASHBOARDS:
        text = json.dumps(
            dashboards.build(name).build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False
        )
        yield CHART_FILES / f"dashboards/{name}.json", f"{text}\n"
    yield CHART_FILES / "alerts.yaml", alerts.render()
    yield COMPOSE / "alerts.yaml", alerts.filled_in(alerts.render())


def main() -> int:
    """Write or check; 1 when a file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for path, text in documents():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in stale:
        sys.stderr.write(f"{path}: {'out of date' if check else 'written'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
