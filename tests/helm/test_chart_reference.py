"""The chart's README says what every value is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import yaml
from rendered_chart import CHART, ROOT, Document

SCRIPT = ROOT / "helm/values_reference.py"


def test_the_page_is_what_the_values_say() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run `make docs`"


def leaves(values: Document, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_value_is_on_it() -> None:
    page = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = []
    for path in leaves(values):
        parts = path.split(".")
        if parts[0] == "decode":
            parts[0] = "prefill"
        parents = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        if not any(f"| `{parent}` |" in page for parent in parents):
            missing.append(path)
    assert missing == []


def test_it_has_the_whole_of_every_comment() -> None:
    page = (CHART / "README.md").read_text()
    lines = (CHART / "values.yaml").read_text().splitlines()
    comments = [line.strip().removeprefix("# ") for line in lines[2:] if line.strip().startswith("# ")]
    assert len(comments) > 200
    headings = {"Prefill and decode have the same keys."}
    missing = [text for text in comments if text.removeprefix("-- ") not in page and text not in headings]
    assert missing == []


def test_every_example_is_on_it() -> None:
    page = (CHART / "README.md").read_text()
    for path in (CHART / "ci").glob("*-values.yaml"):
        assert f"(ci/{path.name}) | " in page
        assert path.read_text().startswith("# ")


def test_the_golden_renders_are_what_the_chart_makes() -> None:
    script = ROOT / "helm/golden_renders.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run `make docs` and review the difference: {done.stderr}"
