"""Write what examples and steps of an upgrade render to, or with ``--check`` say which files are out of date.

The files are for reviewers: a change of a template shows in a commit as the difference that a cluster sees.
Dashboards are left out, which are files of their own, and a Secret's random values are named instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parent / "antiphon"
GOLDEN = Path(__file__).resolve().parents[1] / "tests/helm/golden"


UPGRADED = "cpu-demo"
"""The example over which the steps of an upgrade are rendered."""


def overlaid(base: Any, change: Any) -> Any:
    """Values over values, as Helm does it with several files."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: overlaid(base.get(key), value) for key, value in change.items()}


def renders() -> dict[str, Any]:
    """Name of each golden file -> the values that it is rendered from."""
    examples = sorted((CHART / "ci").glob("*-values.yaml"))
    values = {path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text()) for path in examples}
    for step in sorted((CHART / "ci/upgrade").glob("*.yaml")):
        values[f"upgrade-{step.stem}"] = overlaid(values[UPGRADED], yaml.safe_load(step.read_text()))
    return values


def rendered(values: Any) -> str:
    """All documents of these values, in the order of the templates."""
    with helm_python.Chart.load(CHART) as chart:
        manifests = chart.render(values, name="demo", namespace="prod")
    parts = []
    for path in sorted(manifests):
        text = manifests[path].strip()
        if path.endswith("secrets.yaml"):
            text = re.sub(
                r"^(  (?:api-keys|auth_token): ).+$", r"\1<made at random>", text, flags=re.MULTILINE
            )
        documents = [part for part in re.split(r"^---\n", text, flags=re.MULTILINE) if part.strip()]
        kept = [part.strip() for part in documents if "-dashboard-" not in part]
        if kept:
            parts.append(f"# {path}\n" + "\n---\n".join(kept))
    return "\n---\n".join(parts) + "\n"


def main() -> int:
    """Write or check; 1 when a file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name, values in renders().items():
        path, text = GOLDEN / f"{name}.yaml", rendered(values)
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
