"""Write what the chart's examples render to, or with ``--check`` say which files are out of date.

The files are for reviewers: a change of a template shows in a commit as the difference that a cluster sees.
Dashboards are left out, which are files of their own, and a Secret's random values are named instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import helm_python
import yaml

CHART = Path(__file__).resolve().parent / "antiphon"
GOLDEN = Path(__file__).resolve().parents[1] / "tests/helm/golden"


def rendered(example: Path) -> str:
    """All documents of an example, in the order of the templates."""
    with helm_python.Chart.load(CHART) as chart:
        manifests = chart.render(yaml.safe_load(example.read_text()), name="demo", namespace="prod")
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
    for example in sorted((CHART / "ci").glob("*-values.yaml")):
        path, text = GOLDEN / f"{example.name.removesuffix('-values.yaml')}.yaml", rendered(example)
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
