"""The chart's README: comments in its values that begin with ``# --`` say what the key below them is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent / "antiphon"
README = CHART / "README.md"

INTRODUCTION = """\
# The antiphon chart

Installs one deployment of Antiphon: a RayCluster of [KubeRay](https://github.com/ray-project/kuberay) whose
head holds the supervisor, a group of pods per role (or one group for both, for NVLink), router pods behind a
Service, and what watches them. The cluster needs KubeRay's operator 1.6 or newer; the Prometheus operator is
optional.

```sh
helm install RELEASE helm/antiphon -f helm/antiphon/ci/two-gpus-values.yaml
```

| example | what it is |
|---|---|
{examples}
How to install, watch and upgrade is in [docs/operations](../../docs/operations/kubernetes.md). Values that
contradict each other are refused with what to change, and so is an unknown key. What only the deployment
file or the model tells, such as a wrong key below a `config:` or pages that do not fit beside the weights,
the supervisor refuses at its start, in its log; `antiphon config check` does so before.

## Values

`prefill` and `decode` have the same keys; those of `decode` are not repeated. This page is made from
`values.yaml` by `make docs`.

| key | default | what it is |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented key."""

    path: str
    default: object
    text: str


def entries() -> Iterator[Entry]:
    """Every documented key in the order of the file."""
    source = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(source)
    stack: list[tuple[int, str]] = []
    text = ""
    for line in source.splitlines():
        if comment := re.match(r"\s*# -- (.*)", line):
            text = comment[1]
        elif text and (more := re.match(r"\s*# (.*)", line)):
            text += f" {more[1]}"
        elif key := re.match(r"( *)(\w+):", line):
            indent = len(key[1])
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, key[2]))
            if text:
                path = [name for _, name in stack]
                value = defaults
                for name in path:
                    value = value[name]
                yield Entry(".".join(path), value, text)
            text = ""


def render() -> str:
    """The page as Markdown."""
    examples = ""
    for path in sorted((CHART / "ci").glob("*-values.yaml")):
        comment = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        examples += f"| [`{path.name}`](ci/{path.name}) | {' '.join(comment)} |\n"
    rows = "".join(
        f"| `{entry.path}` | `{json.dumps(entry.default)}` | {entry.text} |\n"
        for entry in entries()
        if not entry.path.startswith("decode.") or entry.path == "decode.config"
    )
    return INTRODUCTION.format(examples=examples) + rows


def main() -> int:
    """Write the page; with ``--check`` say whether it is out of date."""
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if README.exists() and README.read_text() == text else 1
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
