"""What a bundle packs is what its programs load: found by walking imports, tried with all else refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from antiphon.benchmarks.bundle import kinds, needs
from antiphon.benchmarks.bundle.kinds import KINDS, LEFT_OUT, packages_of, served_by
from antiphon.benchmarks.bundle.needs import distributions, files_of, imported, locked, normal

ROOT = Path(__file__).resolve().parents[2]

OF_THE_MACHINE = {
    *("torch", "triton", "numpy", "pytest", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *(
        "pluggy",
        "iniconfig",
        "packaging",
        "pygments",
        "setuptools",
        "fsspec",
        "filelock",
        "typing-extensions",
    ),
}
"""With what torch and pytest themselves require."""
STANDS_FOR = {"nixl-cu13": "nixl-cu12"}
"""A CPU build of torch makes NIXL take its libraries of the other CUDA version."""

PROBE = """
import importlib, json, sys
asked = json.load(sys.stdin)
refused, folders = set(asked["refused"]), asked["left_out"]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused or any(f"{name}.".startswith(f"{each}.") for each in folders):
            raise ModuleNotFoundError(f"{name} is not in the bundle", name=name)

sys.meta_path.insert(0, Refuse())
for name in asked["modules"]:
    importlib.import_module(name)
"""


def modules_in(kind: str) -> list[str]:
    """Every module of ours that the kind's programs may load."""
    found: dict[Path, None] = {}
    for each in served_by(kind):
        found |= dict.fromkeys(files_of(each.entries)) | dict.fromkeys(files_of(each.commands, late=False))
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in found)
    return sorted(".".join(("antiphon", *each)) for each in parts if each[0] != "tests")


def import_with_only(packages: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules where nothing but some packages and the machine's own can be imported."""
    there = (
        packages | {STANDS_FOR[name] for name in packages & STANDS_FOR.keys()} | OF_THE_MACHINE | {"antiphon"}
    )
    refused = [
        name
        for name, providers in metadata.packages_distributions().items()
        if there.isdisjoint(map(normal, providers))
    ]
    left_out = [folder.strip("/").replace("/", ".") for name in packages for folder in LEFT_OUT.get(name, ())]
    asked = json.dumps({"refused": refused, "left_out": left_out, "modules": modules})
    command = [sys.executable, "-c", PROBE]
    return subprocess.run(command, input=asked, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_program_loads_from_its_bundle_alone(kind: str) -> None:
    done = import_with_only(packages_of(kind), modules_in(kind))
    assert done.returncode == 0, done.stderr


def test_a_package_too_few_is_seen() -> None:
    done = import_with_only(packages_of("workers") - {"msgspec"}, ["antiphon.benchmarks.worker_pair"])
    assert "msgspec is not in the bundle" in done.stderr


def test_what_the_machine_has_is_never_packed() -> None:
    for kind in KINDS:
        packed = packages_of(kind)
        assert packed.isdisjoint({"torch", "triton", "numpy", "nixl-cu12"})
        assert {name for name in packed if name.startswith("nvidia-")} == {"nvidia-cuda-sanitizer-api"}
        pinned = [
            locked(ROOT / "requirements" / name) for name in ("lock.txt", "sanitizer.txt", "clients.txt")
        ]
        assert packed <= set().union(*pinned)


def test_kinds_bring_what_they_are_for_and_no_more() -> None:
    packed = {kind: packages_of(kind) for kind in KINDS}
    assert packed["kernels"] < packed["workers"] < packed["served"]
    assert packed["kernels"] <= packed["peer"]
    assert "nixl-cu13" in packed["workers"] - packed["kernels"] - packed["peer"]
    assert {"ray", "openai", "fastapi"} <= packed["served"] - packed["workers"]
    assert "matplotlib" not in packed["served"]


def test_imports_are_walked_through_functions_and_not_through_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "first.py").write_text("import json, beside\nfrom antiphon.folder import second\n")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "folder/second.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import only_types\n"
        "import outright.part\n"
        "def late():\n    import later\n    from antiphon.third import anything\n"
    )
    (tmp_path / "third.py").write_text("import deep\n")
    every, early = files_of(["antiphon.first"]), files_of(["antiphon.first"], late=False)
    assert [path.name for path in every] == ["first.py", "second.py", "third.py"]
    assert imported(every) == {"outright", "later", "deep"}
    assert imported(early, late=False) == {"outright"}
    with pytest.raises(ModuleNotFoundError, match=r"antiphon\.absent: no such file"):
        files_of(["antiphon.absent"])


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(LookupError, match="no_such_module: no installed package"):
        distributions(["no_such_module"], (), (), {})
    with pytest.raises(LookupError, match="no-such-package: required, and not installed"):
        distributions([], ["no-such-package"], (), {})
    assert distributions(["nixl"], (), (), kinds.INSTEAD | {"nixl-cu13": ()}) == {"nixl", "nixl-cu13"}


def test_a_lock_without_a_version_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# comment\nOne_Two==1.0\n")
    assert locked(lock) == {"one-two": "1.0"}
    lock.write_text("one>=1.0\n")
    with pytest.raises(LookupError, match=r"'one>=1\.0' pins no version"):
        locked(lock)
