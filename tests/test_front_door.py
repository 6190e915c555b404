"""What the front pages say exists: the files they link to, the commands they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]

LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
COMMAND = re.compile(r"(?:^|[`/ ])antiphon ((?:checkpoint |config |harmony )?[a-z]+)\b")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = [t for t in LINK.findall((ROOT / page).read_text()) if "://" not in t]
    assert targets or page == "CHANGELOG.md"
    assert not [target for target in targets if not (ROOT / target).exists()]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    code = re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", (ROOT / page).read_text(), re.DOTALL)
    named = {target for pair in code for text in pair for target in re.findall(r"\bmake ([a-z-]+)", text)}
    declared = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= declared


def test_commands_exist() -> None:
    code = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    named = sorted(set(COMMAND.findall(code)))
    assert "chat" in named
    assert "checkpoint inspect" in named
    for command in named:
        arguments = [sys.executable, "-m", "antiphon.cluster.cli", *command.split(), "--help"]
        assert subprocess.run(arguments, capture_output=True, check=False).returncode == 0, command


def test_every_top_level_folder_is_described() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.name for path in (ROOT / "src/antiphon").iterdir() if path.is_symlink()}
    assert not [name for name in folders if f"`{name}/`" not in text]


def test_lock_pins_every_requirement() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    names = {re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    lock = (ROOT / "requirements/lock.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lock if "==" in line}
    assert names <= pinned, sorted(names - pinned)


def test_the_configuration_page_is_that_of_the_schema() -> None:
    from antiphon.configs.reference import render_reference

    assert (ROOT / "docs/configuration.md").read_text() == render_reference(), "run `make docs`"


def test_every_key_is_documented_on_the_page() -> None:
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()
    keys = [row.split("|") for row in rows if row.startswith("| `")]
    assert len(keys) > 40
    assert not [cells[1] for cells in keys if not cells[-2].strip()]
